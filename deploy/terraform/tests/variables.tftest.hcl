# Variables refuse invalid values: one of each kind of condition, and those that protect a run.

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

run "actor_hosts_refuses_fraction" {
  command = plan

  variables {
    actor_hosts = 2.5
  }
  expect_failures = [var.actor_hosts]
}

run "instance_types_refuses_role" {
  command = plan

  variables {
    instance_types = { teacher = ["c7i.large"] }
  }
  expect_failures = [var.instance_types]
}

run "instance_types_refuses_arm" {
  command = plan

  variables {
    instance_types = { actor = ["c7i.large", "c7g.large"] }
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

run "zone_names_refuses_local_zone" {
  command = plan

  variables {
    zone_names = ["us-east-1-bos-1a"]
  }
  expect_failures = [var.zone_names]
}

run "tags_refuses_fleet" {
  command = plan

  variables {
    tags = { fleet = "x" }
  }
  expect_failures = [var.tags]
}
