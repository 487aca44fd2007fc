# What is refused: invalid values of variables, one of each kind of condition, and conditions on several (rules.tf).

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit      = "0123456789abcdef0123456789abcdef01234567"
  alarm_email = "someone@example.org"
}

run "values" {
  command = plan

  variables {
    commit         = "main"
    name           = "Bad_Name"
    region         = "us-gov-west-1"
    size           = "huge"
    run            = "../run"
    task           = "Pong v5"
    config_file    = "configs/atari.yaml"
    settings       = { seed = "1 $(reboot)" }
    instance_types = { teacher = ["c7i.large"] }
    volume_gib     = { teacher = 100 }
    tags           = { fleet = "x" }
  }
  expect_failures = [
    var.commit, var.name, var.region, var.size, var.run, var.task, var.config_file, var.settings, var.instance_types,
    var.volume_gib, var.tags
  ]
}

run "settings_of_the_fleet_and_old_gpus" {
  command = plan

  variables {
    settings       = { "addresses.status" = "tcp://*:1" }
    instance_types = { learner = ["p3.2xlarge"] }
  }
  expect_failures = [var.settings, var.instance_types]
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

run "zone_has_every_endpoint" {
  command = plan

  variables {
    zone_names = ["us-east-1a"]
  }
  override_data {
    target = data.aws_vpc_endpoint_service.interface["servicediscovery"]
    values = { availability_zones = ["us-east-1b"] }
  }
  expect_failures = [terraform_data.rules]
}

run "running_fleet_needs_images" {
  command = plan

  override_data {
    target = data.aws_ami_ids.own
    values = { ids = [] }
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
