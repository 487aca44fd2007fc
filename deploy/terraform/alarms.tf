# Alarms for the operator. Each host reports once a minute (deploy/host/report_health.py): Healthy is 1 if the status of
# its role shows no problem, as `python main.py status` prints it, or if the role has ended because the run is over.

locals {
  health_alarms = { # a minute is bad if the role should have hosts and no report says that one is healthy
    replay-stopped = {
      role = "replay", stat = "Maximum", bad = 10, minutes = 15, ends = []
      text = "The replay server has a problem: everyone waits for it."
    }
    learner-stopped = {
      role = "learner", stat = "Maximum", bad = 10, minutes = 15, ends = []
      text = "The learner makes no updates, cannot save, or does not run."
    }
    actors-failing = {
      role = "actor", stat = "Average", bad = 10, minutes = 15, ends = []
      text = "More than a tenth of the actor hosts have a problem."
    }
    evaluator-stopped = {
      role = "evaluator", stat = "Maximum", bad = 10, minutes = 15, ends = []
      text = "The evaluator does not run, or spot capacity is short: the curve of results has a gap."
    }
    # No quota or no capacity for its host: only minutes of learning count towards the run's limit, so without this,
    # actors and evaluator would cost on for ever. It looks for any report: a learner that waits for actors is there.
    # Not tried on AWS. The periods of an alarm are a day at most:
    # https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricAlarm.html
    no-learner = {
      role = "learner", stat = "SampleCount", bad = 120, minutes = 120, ends = ["actor", "evaluator"]
      text = "No host of the learner for 120 minutes: actors and evaluator end. Once there is one (`why` says what was wrong), apply again."
    }
  }

  full_alarms = {
    learner-disk  = { role = "learner", metric = "DiskUsedPercent", lower = "learner.checkpoints_kept" }
    replay-memory = { role = "replay", metric = "MemoryUsedPercent", lower = "replay.capacity_transitions" }
    replay-disk   = { role = "replay", metric = "DiskUsedPercent", lower = "replay.capacity_transitions" }
  }
}

resource "aws_sns_topic" "alarms" {
  name              = "${var.name}-alarms"
  kms_master_key_id = aws_kms_key.fleet.arn
}

check "alarm_email" {
  assert {
    condition     = !var.running || var.alarm_email != ""
    error_message = "alarm_email is empty: nobody will be told that the learner or the replay server has stopped, that capacity is short, a disk full, or the run over."
  }
}

resource "aws_sns_topic_subscription" "email" {
  count = var.alarm_email == "" ? 0 : 1

  topic_arn = aws_sns_topic.alarms.arn
  protocol  = "email"
  endpoint  = var.alarm_email
}

# No minute counts before the group exists. Ten minutes are more than a start takes.
resource "aws_cloudwatch_metric_alarm" "health" {
  for_each = {
    for name, alarm in local.health_alarms : name => alarm
    if var.running && local.hosts[alarm.role] > 0 && (alarm.role != "replay" || local.actor_hosts > 0) # it needs actors
  }

  alarm_name          = "${var.name}-${each.key}"
  alarm_description   = "${each.value.text} See its log, and the stream of its host."
  comparison_operator = "LessThanThreshold"
  threshold           = each.value.role == "actor" ? 0.9 : 1
  evaluation_periods  = each.value.minutes
  datapoints_to_alarm = each.value.bad
  treat_missing_data  = "notBreaching"
  alarm_actions       = concat([aws_sns_topic.alarms.arn], [for role in each.value.ends : aws_autoscaling_policy.end[role].arn])
  ok_actions          = [aws_sns_topic.alarms.arn]

  metric_query {
    id          = "fine"
    expression  = "MAX([healthy, unwanted])"
    label       = "healthy, or not wanted"
    return_data = true
  }
  metric_query {
    id         = "unwanted" # 0 while the group should have hosts, so that a minute without a report counts as 0
    expression = "desired == 0"
  }
  metric_query {
    id = "desired"

    metric {
      namespace   = "AWS/AutoScaling"
      metric_name = "GroupDesiredCapacity"
      dimensions  = { AutoScalingGroupName = aws_autoscaling_group.role[each.value.role].name }
      stat        = "Maximum"
      period      = 60
    }
  }
  metric_query {
    id = "healthy"

    metric {
      namespace   = local.metric_namespaces[each.value.role]
      metric_name = "Healthy"
      stat        = each.value.stat
      period      = 60
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "full" {
  for_each = var.running ? local.full_alarms : {}

  alarm_name          = "${var.name}-${each.key}"
  alarm_description   = "${each.value.metric} of the ${each.value.role} host is above 85: lower ${each.value.lower}, or give it more (instance_types, volume_gib)."
  namespace           = local.metric_namespaces[each.value.role]
  metric_name         = each.value.metric
  statistic           = "Maximum"
  comparison_operator = "GreaterThanThreshold"
  threshold           = 85
  period              = 60
  evaluation_periods  = 5
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
}

resource "aws_cloudwatch_metric_alarm" "actors_missing" {
  count = var.running && local.actor_hosts > 0 ? 1 : 0

  alarm_name          = "${var.name}-actors-missing"
  alarm_description   = "Fewer actor hosts than asked for: spot capacity is short. Add instance types or zones, or wait."
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  evaluation_periods  = 15
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]

  metric_query {
    id          = "missing"
    expression  = "desired - running"
    label       = "missing hosts"
    return_data = true
  }

  dynamic "metric_query" {
    for_each = { desired = "GroupDesiredCapacity", running = "GroupInServiceInstances" }

    content {
      id = metric_query.key

      metric {
        namespace   = "AWS/AutoScaling"
        metric_name = metric_query.value
        dimensions  = { AutoScalingGroupName = aws_autoscaling_group.role["actor"].name }
        stat        = "Maximum"
        period      = 60
      }
    }
  }
}
