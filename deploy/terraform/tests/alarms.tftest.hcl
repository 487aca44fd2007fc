# Which conditions raise an alarm or end the fleet, and which do not.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit         = "0123456789abcdef0123456789abcdef01234567"
  delete_results = true # so that the test can delete what it creates
}

run "every_role_is_watched" {
  assert {
    condition = {
      for name, alarm in aws_cloudwatch_metric_alarm.health : name => join(" ", flatten([
        alarm.alarm_name, alarm.threshold, alarm.datapoints_to_alarm, alarm.evaluation_periods,
        [for query in alarm.metric_query : query.metric[0].stat if query.id == "healthy"]
      ]))
      } == {
      learner   = "apex-jax-learner-stopped 1 10 15 Maximum"
      replay    = "apex-jax-replay-stopped 1 10 15 Maximum"
      evaluator = "apex-jax-evaluator-stopped 1 10 15 Maximum"
      actor     = "apex-jax-actors-failing 0.9 10 15 Average"
    }
    error_message = "Each role's health has an alarm; among actors, one healthy host must not hide the others, as it would in a maximum."
  }
  assert {
    condition = alltrue(flatten([
      for role, alarm in aws_cloudwatch_metric_alarm.health : [
        for query in alarm.metric_query : query.metric[0].namespace == local.environment[role].APEX_JAX_NAMESPACE &&
        query.metric[0].dimensions == tomap({ Fleet = local.environment[role].APEX_JAX_FLEET, Role = role }) if query.id == "healthy"
      ]
    ]))
    error_message = "Alarms read what the hosts report."
  }
  assert {
    condition = alltrue([
      for alarm in concat(values(aws_cloudwatch_metric_alarm.health), values(aws_cloudwatch_metric_alarm.end), aws_cloudwatch_metric_alarm.actors_missing) :
      alarm.treat_missing_data == "notBreaching"
    ])
    error_message = "What is missing before a group exists raises no alarm; later the group's desired hosts make a missing report an unhealthy one."
  }
  assert {
    condition = { for name, alarm in aws_cloudwatch_metric_alarm.full : name => "${alarm.dimensions.Role} ${alarm.metric_name}" } == {
      learner-disk  = "learner DiskUsedPercent"
      replay-memory = "replay MemoryUsedPercent"
      replay-disk   = "replay DiskUsedPercent"
    }
    error_message = "Memory and disks that grow are watched."
  }
}

run "end_of_the_run_ends_every_group" {
  assert {
    condition = { for name, alarm in aws_cloudwatch_metric_alarm.end : name => alarm.evaluation_periods } == {
      actor = 3, replay = 5, evaluator = 40, learner = 42
    }
    error_message = "The evaluator has time for the final weights, and the host that reports the end goes last."
  }
  assert {
    condition = alltrue([
      for alarm in aws_cloudwatch_metric_alarm.end : "${alarm.metric_name} ${alarm.statistic} ${alarm.threshold}" == "Finished Minimum 1" &&
      alarm.dimensions.Role == "learner" && alarm.dimensions.Run == local.environment.learner.APEX_JAX_RUN_AND_END
    ]) && local.environment.learner.APEX_JAX_RUN_AND_END == "run-1 total_minutes=240"
    error_message = "Only the end of this run, with these limits, counts."
  }
}

run "run_that_is_over_starts_no_host" {
  command = plan

  override_data {
    target = data.aws_autoscaling_groups.same_run
    values = { names = ["apex-jax-learner", "another-learner"] }
  }
  override_data {
    target = data.aws_autoscaling_group.learner
    values = { desired_capacity = 0, max_size = 1 }
  }
  expect_failures = [check.run]

  assert {
    condition     = sum(values(aws_autoscaling_group.role)[*].desired_capacity) == 0
    error_message = "An apply must not undo what the end of the run did."
  }
}

run "roles_without_hosts_raise_nothing" {
  variables {
    actor_hosts = 0
    evaluator   = false
  }

  assert {
    condition     = toset(keys(aws_cloudwatch_metric_alarm.health)) == toset(["learner"]) && length(aws_cloudwatch_metric_alarm.actors_missing) == 0
    error_message = "Nobody is missed who was not asked for."
  }
}

run "budget_by_mail" {
  variables {
    alarm_email        = "someone@example.org"
    monthly_budget_usd = 100
  }

  assert {
    condition     = aws_sns_topic_subscription.email[0].endpoint == "someone@example.org" && aws_budgets_budget.month[0].limit_amount == "100"
    error_message = "Alarms and the budget write to the address."
  }
  assert {
    condition = toset([
      for one in aws_budgets_budget.month[0].notification :
      join(" ", [one.notification_type, one.comparison_operator, one.threshold, one.threshold_type, join(",", one.subscriber_email_addresses)])
      ]) == toset([
      for when in ["ACTUAL GREATER_THAN 80", "ACTUAL GREATER_THAN 100", "FORECASTED GREATER_THAN 100"] : "${when} PERCENTAGE someone@example.org"
    ])
    error_message = "The budget writes at 80 and 100 % of it, and when more is forecast: a forecast comes late, or never in a new account."
  }
}
