# Encryption, permissions, lifetimes, notifications.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit = "0123456789abcdef0123456789abcdef01234567"
}

run "own_bucket" { # deploy/tests/test_apply.py checks how it is protected
  assert {
    condition     = aws_kms_key.fleet.enable_key_rotation
    error_message = "The key is rotated."
  }
  assert {
    condition     = !aws_s3_bucket.results[0].force_destroy && !terraform_data.results[0].input.may_go
    error_message = "Results are not deleted unless that was asked for."
  }
  assert {
    condition     = aws_sns_topic.alarms.kms_master_key_id == aws_kms_key.fleet.arn
    error_message = "Alarms are encrypted."
  }
}

run "two_replay_servers_have_a_folder_each" {
  variables {
    replay_hosts = 2
  }

  assert {
    condition = toset([
      for rule in aws_s3_bucket_lifecycle_configuration.results[0].rule : rule.filter[0].prefix if startswith(rule.id, "old-")
    ]) == toset(["runs/run-1/replay/", "runs/run-1/replay-1/", "runs/run-1/results/"])
    error_message = "What each replay server replaces stays a day."
  }
  assert {
    condition = {
      for one in data.aws_iam_policy_document.role["replay"].statement : one.sid => sort(one.resources) if contains(["State", "Results"], one.sid)
      } == {
      State   = sort([for name in ["replay", "replay-1"] : "${local.bucket_arn}/runs/run-1/${name}/*"])
      Results = sort([for name in ["metrics/replay.jsonl", "tensorboard/replay/*", "metrics/replay-1.jsonl", "tensorboard/replay-1/*"] : "${local.bucket_arn}/runs/run-1/results/${name}"])
    }
    error_message = "The replay servers may write their folders and results, and no others."
  }
}

run "leave_to_delete_results" {
  variables {
    delete_results = true
  }

  assert {
    condition     = aws_s3_bucket.results[0].force_destroy && terraform_data.results[0].input.may_go
    error_message = "Results are deleted where that was asked for."
  }
}

run "existing_bucket" {
  variables {
    bucket = "my-results"
  }

  assert {
    condition     = length(terraform_data.results) + length(aws_s3_bucket.results) + length(aws_s3_bucket_policy.results) + length(aws_s3_bucket_lifecycle_configuration.results) == 0
    error_message = "A bucket that is given is left as it is, and destroy does not touch it."
  }
  assert {
    condition     = output.run_url == "s3://my-results/runs/run-1" && strcontains(output.user_data.learner, "storage.url=s3://my-results/runs/run-1") && strcontains(output.user_data.replay, "storage.url=s3://my-results/runs/run-1")
    error_message = "The run goes into the given bucket."
  }
}

run "actors_have_no_storage" {
  variables {
    bucket = "my-results"
  }

  assert {
    condition     = !strcontains(output.user_data.actor, "s3://")
    error_message = "An actor neither has nor needs the bucket."
  }
}

run "alarms_by_mail" {
  variables {
    alarm_email        = "someone@example.org"
    monthly_budget_usd = 100
    delete_results     = true
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
