# What is refused: invalid values of variables, one of each kind of condition, and conditions on several (rules.tf).

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit = "0123456789abcdef0123456789abcdef01234567"
}

run "name_refuses_upper_case" {
  command = plan

  variables {
    name = "Bad_Name"
  }
  expect_failures = [var.name]
}

run "region_refuses_cloud_of_its_own" {
  command = plan

  variables {
    region = "us-gov-west-1"
  }
  expect_failures = [var.region]
}

run "size_refuses_unknown" {
  command = plan

  variables {
    size = "huge"
  }
  expect_failures = [var.size]
}

run "settings_refuses_blank" {
  command = plan

  variables {
    settings = { seed = "1 $(reboot)" }
  }
  expect_failures = [var.settings]
}

run "settings_refuses_of_the_fleet" {
  command = plan

  variables {
    settings = { "addresses.status" = "tcp://*:1" }
  }
  expect_failures = [var.settings]
}

run "instance_types_refuses_role" {
  command = plan

  variables {
    instance_types = { teacher = ["c7i.large"] }
  }
  expect_failures = [var.instance_types]
}

run "instance_types_refuses_learner_with_an_old_gpu" {
  command = plan

  variables {
    instance_types = { learner = ["p3.2xlarge"] }
  }
  expect_failures = [var.instance_types]
}

run "volume_gib_refuses_less_than_the_image_of_the_learner" {
  command = plan

  variables {
    volume_gib = { learner = 99 }
  }
  expect_failures = [var.volume_gib]
}

run "tags_refuses_fleet" {
  command = plan

  variables {
    tags = { fleet = "x" }
  }
  expect_failures = [var.tags]
}

run "numbers_are_whole" {
  command = plan

  variables {
    actor_host_environments = 7.5
  }
  expect_failures = [terraform_data.rules]
}

run "run_without_an_end" {
  command = plan

  variables {
    settings = { "total_minutes" = "0", "evaluator.stop_at_return" = "20" } # which may never be reached
  }
  expect_failures = [terraform_data.rules]
}

run "existing_vpc_needs_subnets_and_endpoints" {
  command = plan

  variables {
    vpc_id = "vpc-0123456789abcdef0"
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

run "first_zone_has_a_type_of_the_learner" {
  command = plan

  override_data {
    target = data.aws_ec2_instance_type_offerings.first_zone
    values = { instance_types = ["r7i.large"] }
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

run "budget_needs_an_address" {
  command = plan

  variables {
    monthly_budget_usd = 100
  }
  expect_failures = [terraform_data.rules]
}
