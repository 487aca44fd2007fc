# Conditions that involve several variables (rules.tf).

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit = "0123456789abcdef0123456789abcdef01234567"
}

run "run_without_an_end" {
  command = plan

  variables {
    settings = { "total_minutes" = "0", "evaluator.stop_at_return" = "20" } # which may never be reached
  }
  expect_failures = [terraform_data.rules]
}

run "existing_vpc_needs_subnets" {
  command = plan

  variables {
    vpc_id = "vpc-0123456789abcdef0"
  }
  expect_failures = [terraform_data.rules]
}

run "subnets_need_a_vpc" {
  command = plan

  variables {
    subnet_ids = ["subnet-0123456789abcdef0"]
  }
  expect_failures = [terraform_data.rules]
}

run "zone_names_are_for_an_own_vpc" {
  command = plan

  variables {
    vpc_id     = "vpc-0123456789abcdef0"
    subnet_ids = ["subnet-0123456789abcdef0"]
    zone_names = ["us-east-1a"]
  }
  expect_failures = [terraform_data.rules]
}

run "zone_names_are_of_the_region" {
  command = plan

  variables {
    zone_names = ["eu-west-1a"]
  }
  expect_failures = [terraform_data.rules]
}

run "zones_are_as_many_as_the_region_has" {
  command = plan

  override_data {
    target = data.aws_availability_zones.available
    values = { names = ["us-east-1a"] }
  }
  expect_failures = [terraform_data.rules]
}

run "first_zone_has_a_type_of_the_learner" {
  command = plan

  override_data {
    target = data.aws_ec2_instance_type_offerings.first_zone
    values = { instance_types = ["r7i.large"] }
  }
  expect_failures = [terraform_data.rules]
}

run "first_zone_has_a_type_of_the_replay_server" {
  command = plan

  variables {
    instance_types = { replay = ["x9z.large"] }
  }
  expect_failures = [terraform_data.rules]
}

run "vpc_cidr_has_addresses_for_all_hosts" {
  command = plan

  variables {
    vpc_cidr    = "10.83.0.0/24"
    actor_hosts = 38 # with 3 other hosts and 4 successors, one too many
  }
  expect_failures = [terraform_data.rules]
}

run "ladder_has_a_place_for_each_environment_of_a_host" {
  command = plan

  variables {
    ladder_environments     = 7
    actor_host_environments = 8
  }
  expect_failures = [terraform_data.rules]
}

run "ladder_has_an_environment_for_each_replay_server" {
  command = plan

  variables {
    replay_hosts            = 2
    ladder_environments     = 1
    actor_host_environments = 1
  }
  expect_failures = [terraform_data.rules]
}

run "each_replay_server_has_an_actor_host" {
  command = plan

  variables {
    replay_hosts = 3 # and two actor hosts
  }
  expect_failures = [terraform_data.rules]
}

run "gpus_divide_the_replay_servers" {
  command = plan

  variables {
    replay_hosts    = 2
    learner_devices = 4
  }
  expect_failures = [terraform_data.rules]
}

run "own_vpc_needs_endpoints" {
  command = plan

  variables {
    create_endpoints            = false
    endpoints_security_group_id = "sg-0123456789abcdef0"
  }
  expect_failures = [terraform_data.rules]
}

run "endpoints_group_is_for_existing_endpoints" {
  command = plan

  variables {
    endpoints_security_group_id = "sg-0123456789abcdef0"
  }
  expect_failures = [terraform_data.rules]
}

run "existing_endpoints_need_their_group" {
  command = plan

  variables {
    vpc_id             = "vpc-0123456789abcdef0"
    subnet_ids         = ["subnet-0123456789abcdef0"]
    route_table_ids    = ["rtb-0123456789abcdef0"]
    existing_endpoints = ["ssm"]
  }
  expect_failures = [terraform_data.rules]
}

run "own_vpc_has_no_endpoints_before" {
  command = plan

  variables {
    existing_endpoints = ["s3"]
  }
  expect_failures = [terraform_data.rules]
}

run "existing_endpoints_are_some_of_those_made" {
  command = plan

  variables {
    vpc_id                      = "vpc-0123456789abcdef0"
    subnet_ids                  = ["subnet-0123456789abcdef0"]
    create_endpoints            = false
    endpoints_security_group_id = "sg-0123456789abcdef0"
    existing_endpoints          = ["s3"]
  }
  expect_failures = [terraform_data.rules]
}

run "endpoint_of_s3_needs_route_tables" {
  command = plan

  variables {
    vpc_id     = "vpc-0123456789abcdef0"
    subnet_ids = ["subnet-0123456789abcdef0"]
  }
  expect_failures = [terraform_data.rules]
}

run "route_tables_are_for_an_endpoint_of_s3_that_is_made" {
  command = plan

  variables {
    vpc_id             = "vpc-0123456789abcdef0"
    subnet_ids         = ["subnet-0123456789abcdef0"]
    route_table_ids    = ["rtb-0123456789abcdef0"]
    existing_endpoints = ["s3"]
  }
  expect_failures = [terraform_data.rules]
}

run "bucket_is_of_the_region" {
  command = plan

  variables {
    bucket = "my-results"
  }
  override_data {
    target = data.aws_s3_bucket.given
    values = { region = "eu-west-1" }
  }
  expect_failures = [terraform_data.rules]
}

run "bucket_key_needs_a_bucket" {
  command = plan

  variables {
    bucket_kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/00000000-0000-0000-0000-000000000000"
  }
  expect_failures = [terraform_data.rules]
}

run "budget_needs_an_address" {
  command = plan

  variables {
    monthly_budget_usd = 100
  }
  expect_failures = [terraform_data.rules]
}
