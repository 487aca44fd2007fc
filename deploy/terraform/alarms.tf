# Alarms for the operator. Each host reports once a minute (deploy/host/report_health.py): Healthy is 1 if the status of
# its role shows no problem, as `python main.py status` prints it, or if the role has ended because the run is over.

locals {
  health_alarms = {
    replay  = { alarm = "replay-stopped", description = "The replay server has a problem: everyone waits for it." }
    learner = { alarm = "learner-stopped", description = "The learner makes no updates, cannot save, or does not run." }
    actor   = { alarm = "actors-failing", description = "More than a tenth of the actor hosts have a problem." }
    evaluator = {
      alarm       = "evaluator-stopped"
      description = "The evaluator does not run, or spot capacity is short: the curve of results has a gap."
    }
  }

  full_alarms = {
    learner-disk = {
      description = "The learner's disk is nearly full: lower learner.checkpoints_kept."
      metric      = "DiskUsedPercent", role = "learner"
    }
    replay-memory = {
      description = "The replay server's memory is nearly full: lower replay.capacity_transitions or take a larger type."
      metric      = "MemoryUsedPercent", role = "replay"
    }
    replay-disk = {
      description = "The replay server's disk is nearly full: its journal and snapshots need room."
      metric      = "DiskUsedPercent", role = "replay"
    }
  }
}

resource "aws_sns_topic" "alarms" {
  name              = "${var.name}-alarms"
  kms_master_key_id = aws_kms_key.fleet.arn
}

resource "aws_sns_topic_subscription" "email" {
  count = var.alarm_email == "" ? 0 : 1

  topic_arn = aws_sns_topic.alarms.arn
  protocol  = "email"
  endpoint  = var.alarm_email
}

# A minute counts as bad if the group should have hosts and none reports that it is healthy (of actors: fewer than nine of
# ten). No minute counts before the group exists. Ten minutes are more than a start takes.
resource "aws_cloudwatch_metric_alarm" "health" {
  for_each = { for name, alarm in local.health_alarms : name => alarm if var.running && local.hosts[name] > 0 && (name != "replay" || local.actor_hosts > 0) } # without actors it has a problem

  alarm_name          = "${var.name}-${each.value.alarm}"
  alarm_description   = "${each.value.description} See its log, and the stream of its host."
  comparison_operator = "LessThanThreshold"
  threshold           = each.key == "actor" ? 0.9 : 1
  evaluation_periods  = 15
  datapoints_to_alarm = 10
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_sns_topic.alarms.arn]
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
      dimensions  = { AutoScalingGroupName = aws_autoscaling_group.role[each.key].name }
      stat        = "Maximum"
      period      = 60
    }
  }
  metric_query {
    id = "healthy"

    metric {
      namespace   = local.metric_namespace
      metric_name = "Healthy"
      dimensions  = { Fleet = var.name, Role = each.key }
      stat        = each.key == "actor" ? "Average" : "Maximum"
      period      = 60
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "full" {
  for_each = var.running ? local.full_alarms : {}

  alarm_name          = "${var.name}-${each.key}"
  alarm_description   = each.value.description
  namespace           = local.metric_namespace
  metric_name         = each.value.metric
  dimensions          = { Fleet = var.name, Role = each.value.role }
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

resource "aws_budgets_budget" "month" {
  count = var.monthly_budget_usd > 0 ? 1 : 0

  name         = "${var.name}-month"
  budget_type  = "COST"
  limit_amount = tostring(var.monthly_budget_usd)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"

  dynamic "notification" { # AWS forecasts only after weeks of costs: until then, only actual costs are reported
    for_each = toset(["FORECASTED 100", "ACTUAL 80", "ACTUAL 100"])

    content {
      comparison_operator        = "GREATER_THAN"
      notification_type          = split(" ", notification.value)[0]
      threshold                  = tonumber(split(" ", notification.value)[1])
      threshold_type             = "PERCENTAGE"
      subscriber_email_addresses = [var.alarm_email]
    }
  }
}
