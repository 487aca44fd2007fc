# What a state remembers: the fleet that it is of.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit         = "0123456789abcdef0123456789abcdef01234567"
  delete_results = true # so that the test can delete what it creates
}

run "name_and_region" {
  variables {
    name   = "blue"
    region = "eu-west-1"
  }

  assert {
    condition     = aws_service_discovery_private_dns_namespace.fleet.name == "blue.internal" && aws_service_discovery_private_dns_namespace.fleet.vpc == aws_vpc.fleet[0].id
    error_message = "Names are of the fleet, and known in its VPC alone."
  }
  assert {
    condition     = { for role, service in aws_service_discovery_service.host : role => service.name } == { replay = "replay", learner = "learner" }
    error_message = "Replay and learner have names: the others look for them."
  }
  assert {
    condition = alltrue([
      for service in aws_service_discovery_service.host :
      service.dns_config[0].namespace_id == aws_service_discovery_private_dns_namespace.fleet.id && service.dns_config[0].routing_policy == "MULTIVALUE" &&
      [for record in service.dns_config[0].dns_records : "${record.type} ${record.ttl}"] == ["A 10"]
    ])
    error_message = "A name is one address, which peers ask for anew after 10 s."
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

run "name_that_was_forgotten_is_refused" {
  command = plan

  variables {
    region = "eu-west-1"
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
