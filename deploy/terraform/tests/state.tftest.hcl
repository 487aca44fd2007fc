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
    condition = aws_service_discovery_private_dns_namespace.fleet.name == "blue.internal" && [
      for service in aws_service_discovery_service.host : [service.name, service.dns_config[0].routing_policy, service.dns_config[0].dns_records[0].ttl]
    ] == [["learner", "MULTIVALUE", 10], ["replay", "MULTIVALUE", 10]]
    error_message = "Replay and learner have names of the fleet, each of one address, which peers ask for anew after 10 s."
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

run "commands_know_the_variables_of_the_newest_apply" {
  variables {
    name   = "blue"
    region = "eu-west-1"
    tags   = { "Team" = "a" }
  }

  assert {
    condition     = strcontains(output.choices, "region = \"eu-west-1\"\n") && strcontains(output.choices, "tags = {\"Team\":\"a\"}\n") && strcontains(output.choices, "actor_hosts = null\n")
    error_message = "All choices, as a file of variables: ${output.choices}"
  }
}
