# Alarms for the operator. Each host reports its health once a minute (deploy/host/report_health.py).

locals {
  # A role that hangs or fails repeatedly looks healthy for some minutes after each start: 8 unhealthy minutes of 15
  # raise an alarm. A minute without a report of any host counts as unhealthy.
  health = {
    metric  = "Healthy", statistic = "Maximum", operator = "LessThanThreshold", threshold = 1
    minutes = 15, of_which = 8, missing = "breaching"
  }

  alarms = { for name, alarm in local.every_alarm : name => alarm if var.running && local.hosts[local.role_of[alarm.role]] > 0 }

  # `role` is what hosts report as their role: a replay server reports its name, so that none hides another.
  every_alarm = merge(local.replay_alarms, {
    learner-stopped = merge(local.health, {
      description = "The learner is not healthy: it has ended the run, hangs, or fails. See its log."
      role        = "learner"
    })
    evaluator-stopped = merge(local.health, {
      description = "The evaluator is not healthy, or spot capacity is short: the curve of results has a gap. See its log."
      role        = "evaluator"
    })
    actors-failing = merge(local.health, { # among many hosts, one that has just started must not raise an alarm
      description = "More than a tenth of the actor hosts is not healthy, though they are there: see the actors' logs."
      role        = "actor", statistic = "Average", threshold = 0.9
    })
    learner-disk = {
      description = "The learner's disk is nearly full: lower learner.checkpoints_kept."
      metric      = "DiskUsedPercent", role = "learner", statistic = "Maximum", operator = "GreaterThanThreshold", threshold = 85
      minutes     = 5, of_which = 5, missing = "missing"
    }
  })

  replay_alarms = merge([for name in local.replay_names : {
    "${name}-stopped" = merge(local.health, {
      description = local.replay_hosts == 1 ? "The replay server is not healthy: everyone waits for it. See its log." : "The replay server ${name} is not healthy: the learner draws from the others. See its log."
      role        = name
    })
    "${name}-memory" = {
      description = "The replay server's memory is nearly full: lower replay.capacity_transitions or take a larger type."
      metric      = "MemoryUsedPercent", role = name, statistic = "Maximum", operator = "GreaterThanThreshold", threshold = 85
      minutes     = 5, of_which = 5, missing = "missing"
    }
    "${name}-disk" = {
      description = "The replay server's disk is nearly full: its journal and snapshots need room."
      metric      = "DiskUsedPercent", role = name, statistic = "Maximum", operator = "GreaterThanThreshold", threshold = 85
      minutes     = 5, of_which = 5, missing = "missing"
    }
  }]...)
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

resource "aws_cloudwatch_metric_alarm" "host" {
  for_each = local.alarms

  alarm_name          = "${var.name}-${each.key}"
  alarm_description   = each.value.description
  namespace           = local.metric_namespace
  metric_name         = each.value.metric
  dimensions          = { Fleet = var.name, Role = each.value.role }
  statistic           = each.value.statistic
  comparison_operator = each.value.operator
  threshold           = each.value.threshold
  period              = 60
  evaluation_periods  = each.value.minutes
  datapoints_to_alarm = each.value.of_which
  treat_missing_data  = each.value.missing
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
}

resource "aws_cloudwatch_metric_alarm" "actors_missing" {
  count = var.running && local.actor_hosts > 0 ? 1 : 0

  alarm_name          = "${var.name}-actors-missing"
  alarm_description   = "Fewer actor hosts than asked for: spot capacity is short. Add instance types or zones, or wait."
  namespace           = "AWS/AutoScaling"
  metric_name         = "GroupInServiceInstances"
  dimensions          = { AutoScalingGroupName = module.actor.group_name }
  statistic           = "Maximum"
  comparison_operator = "LessThanThreshold"
  threshold           = local.actor_hosts
  period              = 60
  evaluation_periods  = 15
  treat_missing_data  = "breaching"
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
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
