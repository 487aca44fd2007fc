# Which conditions raise an alarm or end the fleet, which do not, and what an apply only warns of.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit         = "0123456789abcdef0123456789abcdef01234567"
  alarm_email    = "someone@example.org"
  delete_results = true # so that the test can delete what it creates
}

run "every_role_is_watched_and_the_end_ends_every_group" {
  assert {
    condition = {
      for name, alarm in aws_cloudwatch_metric_alarm.health : name => join(" ", flatten([
        alarm.alarm_name, alarm.threshold, alarm.datapoints_to_alarm, alarm.evaluation_periods, alarm.treat_missing_data,
        [for query in alarm.metric_query : [query.metric[0].namespace, query.metric[0].stat] if query.id == "healthy"]
      ]))
      } == {
      learner-stopped   = "apex-jax-learner-stopped 1 10 15 notBreaching ApexJax/apex-jax/learner Maximum"
      replay-stopped    = "apex-jax-replay-stopped 1 10 15 notBreaching ApexJax/apex-jax/replay Maximum"
      evaluator-stopped = "apex-jax-evaluator-stopped 1 10 15 notBreaching ApexJax/apex-jax/evaluator Maximum"
      actors-failing    = "apex-jax-actors-failing 0.9 10 15 notBreaching ApexJax/apex-jax/actor Average"
      no-learner        = "apex-jax-no-learner 1 120 120 notBreaching ApexJax/apex-jax/learner SampleCount"
    }
    error_message = "Each role's health has an alarm; among actors, one healthy host must not hide the others, as it would in a maximum."
  }
  assert {
    condition     = alltrue([for role, environment in local.environment : environment.APEX_JAX_NAMESPACE == "ApexJax/apex-jax/${role}"])
    error_message = "Alarms read what the hosts report."
  }
  assert {
    condition     = { for name, alarm in aws_cloudwatch_metric_alarm.health : name => length(alarm.alarm_actions) if length(alarm.alarm_actions) > 1 } == { no-learner = 2 }
    error_message = "Two hours without a learner end groups: a mail, and the policies, of which the mocked provider makes one."
  }
  assert {
    condition = alltrue([
      for alarm in aws_cloudwatch_metric_alarm.end :
      "${alarm.namespace} ${alarm.metric_name} ${alarm.statistic} ${alarm.threshold} ${alarm.treat_missing_data}" == "ApexJax/apex-jax/learner Finished Minimum 1 notBreaching" &&
      alarm.dimensions.Run == local.environment.learner.APEX_JAX_RUN_AND_END
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

run "account_is_new_and_nobody_would_be_told" {
  command = plan

  variables {
    alarm_email = ""
  }
  override_data {
    target = data.aws_servicequotas_service_quota.gpu
    values = { value = 0, quota_name = "Running On-Demand G and VT instances" }
  }
  expect_failures = [check.quota_gpu, check.alarm_email]

  assert {
    condition     = local.vcpus_needed == { gpu = 4, standard = 2, spot = 10 }
    error_message = "vCPUs are those of the types: not ${jsonencode(local.vcpus_needed)}."
  }
}

run "roles_without_hosts_raise_nothing" {
  variables {
    actor_hosts = 0
    evaluator   = false
  }

  assert {
    condition     = toset(keys(aws_cloudwatch_metric_alarm.health)) == toset(["learner-stopped", "no-learner"]) && length(aws_cloudwatch_metric_alarm.actors_missing) == 0
    error_message = "Nobody is missed who was not asked for."
  }
}
