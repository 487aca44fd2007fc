# Which conditions raise an alarm, and which do not.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit         = "0123456789abcdef0123456789abcdef01234567"
  delete_results = true # so that the test can delete what it creates
}

run "every_role_is_watched" {
  assert {
    condition = toset([for alarm in aws_cloudwatch_metric_alarm.host : alarm.dimensions.Role if alarm.metric_name == "Healthy"]) == toset([
      "replay", "learner", "actor", "evaluator"
    ])
    error_message = "Each role's health has an alarm."
  }
  assert {
    condition = alltrue([
      for alarm in aws_cloudwatch_metric_alarm.host : alarm.treat_missing_data == "breaching" if alarm.metric_name == "Healthy"
    ])
    error_message = "A host that reports nothing is not healthy."
  }
  assert {
    condition = alltrue([
      for alarm in aws_cloudwatch_metric_alarm.host : alarm.evaluation_periods == 15 && alarm.datapoints_to_alarm == 8
      if alarm.metric_name == "Healthy"
    ])
    error_message = "A role that systemd starts again and again is healthy now and then: not every minute has to be bad."
  }
  assert {
    condition = alltrue([
      for alarm in aws_cloudwatch_metric_alarm.host :
      alarm.namespace == local.environment.actor.APEX_JAX_NAMESPACE && alarm.dimensions.Fleet == local.environment.actor.APEX_JAX_FLEET
    ])
    error_message = "Alarms read what the hosts report."
  }
}

run "hosts_of_actors_that_do_not_act_are_told_of" {
  assert {
    condition = (
      aws_cloudwatch_metric_alarm.host["actors-failing"].metric_name == "Healthy" &&
      aws_cloudwatch_metric_alarm.host["actors-failing"].dimensions.Role == "actor" &&
      aws_cloudwatch_metric_alarm.host["actors-failing"].statistic == "Average" &&
      aws_cloudwatch_metric_alarm.host["actors-failing"].comparison_operator == "LessThanThreshold" &&
      aws_cloudwatch_metric_alarm.host["actors-failing"].threshold == 0.9
    )
    error_message = "One healthy actor host must not hide the others, as it would in a maximum."
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.actors_missing[0].metric_name == "GroupInServiceInstances"
    error_message = "Hosts that are not there have an alarm of their own."
  }
}

run "each_replay_server_is_watched_under_its_name" {
  variables {
    replay_hosts = 2
  }

  assert {
    condition = {
      for name, alarm in aws_cloudwatch_metric_alarm.host : name => "${alarm.dimensions.Role} ${alarm.metric_name}" if startswith(name, "replay")
      } == {
      replay-stopped   = "replay Healthy"
      replay-memory    = "replay MemoryUsedPercent"
      replay-disk      = "replay DiskUsedPercent"
      replay-1-stopped = "replay-1 Healthy"
      replay-1-memory  = "replay-1 MemoryUsedPercent"
      replay-1-disk    = "replay-1 DiskUsedPercent"
    }
    error_message = "A healthy replay server must not hide another, as it would in a maximum of both."
  }
}

run "roles_without_hosts_raise_nothing" {
  variables {
    actor_hosts = 0
    evaluator   = false
  }

  assert {
    condition = alltrue([
      for name in ["actors-failing", "evaluator-stopped"] : !contains(keys(aws_cloudwatch_metric_alarm.host), name)
    ]) && length(aws_cloudwatch_metric_alarm.actors_missing) == 0
    error_message = "Nobody is missed who was not asked for."
  }
  assert {
    condition     = contains(keys(aws_cloudwatch_metric_alarm.host), "learner-stopped") && contains(keys(aws_cloudwatch_metric_alarm.host), "replay-stopped")
    error_message = "The others are watched as before."
  }
}
