# What a state remembers: the fleet that it is of.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit         = "0123456789abcdef0123456789abcdef01234567"
  alarm_email    = "someone@example.org"
  delete_results = true # so that the test can delete what it creates
}

run "name_and_region" {
  variables {
    name   = "blue"
    region = "eu-west-1"
  }

  assert {
    condition     = strcontains(output.user_data.actor, "tcp://replay.blue.internal:") && strcontains(output.user_data.actor, "tcp://learner.blue.internal:")
    error_message = "Hosts ask for the names that there are."
  }
  assert {
    condition     = endswith(output.estimated_usd.prices, "eu-west-1 has prices of its own, which are not known here")
    error_message = "The cost says for which region it is: ${output.estimated_usd.prices}."
  }
}

run "region_that_was_forgotten_is_refused" {
  command = plan

  variables {
    name = "blue"
  }
  expect_failures = [terraform_data.rules]
}
