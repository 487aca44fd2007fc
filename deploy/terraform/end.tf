# The end of a run. When the learner has ended because of a limit, its host reports Finished = 1; by then results and, if
# its last copy did not fail, the checkpoint are in the bucket. Alarms then set every group to 0 hosts, and no apply starts hosts again for the same run
# with the same limits.

locals {
  bounds      = ["total_minutes", "total_updates", "total_environment_frames"] # a return may never be reached
  limits      = concat(local.bounds, ["evaluator.stop_at_return"])
  run_and_end = join(" ", concat([var.run], [for key in local.limits : "${key}=${local.settings[key]}" if contains(keys(local.settings), key)]))

  # The learner's group has run this run with these limits, and an alarm has set it to 0 hosts: running = false, which
  # has a maximum of 0, is something else.
  is_over = anytrue([for group in data.aws_autoscaling_group.learner : group.desired_capacity == 0 && group.max_size > 0])
  hosts_of = { # at most, by role
    for role, hosts in local.hosts : role => var.running || local.is_over ? (role == "replay" ? 1 : hosts) : 0
  }

  # How long Finished must be 1 before a group ends. The evaluator plays the final weights meanwhile, as long as a local
  # run lets it; the learner ends last, because its host reports.
  end_minutes = { actor = 3, replay = 5, evaluator = 40, learner = 42 }
}

data "aws_autoscaling_groups" "same_run" {
  filter {
    name   = "tag:ApexJaxRun"
    values = [local.run_and_end]
  }
}

data "aws_autoscaling_group" "learner" {
  for_each = setintersection(data.aws_autoscaling_groups.same_run.names, ["${var.name}-learner"])

  name = each.key
}

check "run" {
  assert {
    condition     = !local.is_over
    error_message = "The run ${var.run} is over, so this starts no host: give another name (run), or raise its limit (total_minutes in settings)."
  }
}

resource "aws_cloudwatch_metric_alarm" "end" {
  for_each = var.running ? local.roles : toset([])

  # Another run has alarms of its own, because one that is still on would end its hosts.
  alarm_name          = "${var.name}-end-${each.key}-${substr(sha1(local.run_and_end), 0, 8)}"
  alarm_description   = "The run ${var.run} is over: ${each.key} ends. Results: ${local.run_url}. `running=false` ends the costs of endpoints."
  namespace           = local.metric_namespaces["learner"]
  metric_name         = "Finished"
  dimensions          = { Run = local.run_and_end }
  statistic           = "Minimum"
  comparison_operator = "GreaterThanOrEqualToThreshold"
  threshold           = 1
  period              = 60
  evaluation_periods  = local.end_minutes[each.key]
  treat_missing_data  = "notBreaching" # the alarm must not stay: it would end the hosts of a later apply
  alarm_actions       = concat([aws_autoscaling_policy.end[each.key].arn], each.key == "learner" ? [aws_sns_topic.alarms.arn] : [])
}
