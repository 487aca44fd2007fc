# Each variable refuses invalid values. deploy/tests/test_terraform.py checks that none is missing here.

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

run "name_refuses_last_dash" {
  command = plan

  variables {
    name = "ends-"
  }
  expect_failures = [var.name]
}

run "region_refuses_word" {
  command = plan

  variables {
    region = "virginia"
  }
  expect_failures = [var.region]
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

run "commit_refuses_branch" {
  command = plan

  variables {
    commit = "main"
  }
  expect_failures = [var.commit]
}

run "run_refuses_folder" {
  command = plan

  variables {
    run = "a/b"
  }
  expect_failures = [var.run]
}

run "task_refuses_without_version" {
  command = plan

  variables {
    task = "Pong"
  }
  expect_failures = [var.task]
}

run "config_file_refuses_folder" {
  command = plan

  variables {
    config_file = "../secret.yaml"
  }
  expect_failures = [var.config_file]
}

run "settings_refuses_key" {
  command = plan

  variables {
    settings = { "seed; reboot" = "1" }
  }
  expect_failures = [var.settings]
}

run "settings_refuses_blank" {
  command = plan

  variables {
    settings = { seed = "1 $(reboot)" }
  }
  expect_failures = [var.settings]
}

run "settings_refuses_empty" {
  command = plan

  variables {
    settings = { seed = "" }
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

run "replay_hosts_refuses_fraction" {
  command = plan

  variables {
    replay_hosts = 1.5
  }
  expect_failures = [var.replay_hosts]
}

run "learner_devices_refuses_fraction" {
  command = plan

  variables {
    learner_devices = 1.5
  }
  expect_failures = [var.learner_devices]
}

run "ladder_environments_refuses_fraction" {
  command = plan

  variables {
    ladder_environments = 1.5
  }
  expect_failures = [var.ladder_environments]
}

run "actor_hosts_refuses_fraction" {
  command = plan

  variables {
    actor_hosts = 2.5
  }
  expect_failures = [var.actor_hosts]
}

run "actor_host_environments_refuses_zero" {
  command = plan

  variables {
    actor_host_environments = 0
  }
  expect_failures = [var.actor_host_environments]
}

run "actor_spot_percentage_refuses_above" {
  command = plan

  variables {
    actor_spot_percentage = 101
  }
  expect_failures = [var.actor_spot_percentage]
}

run "actor_spot_percentage_refuses_null" {
  command = plan

  variables {
    actor_spot_percentage = null
  }
  expect_failures = [var.actor_spot_percentage]
}

run "instance_types_refuses_role" {
  command = plan

  variables {
    instance_types = { teacher = ["c7i.large"] }
  }
  expect_failures = [var.instance_types]
}

run "instance_types_refuses_none" {
  command = plan

  variables {
    instance_types = { actor = [] }
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

run "instance_types_refuses_learner_without_gpu" {
  command = plan

  variables {
    instance_types = { learner = ["c7i.2xlarge"] }
  }
  expect_failures = [var.instance_types]
}

run "instance_types_refuses_learner_with_a_gpu_of_amd" {
  command = plan

  variables {
    instance_types = { learner = ["g4ad.xlarge"] }
  }
  expect_failures = [var.instance_types]
}

run "volume_gib_refuses_role" {
  command = plan

  variables {
    volume_gib = { teacher = 100 }
  }
  expect_failures = [var.volume_gib]
}

run "volume_gib_refuses_less_than_the_image_of_the_learner" {
  command = plan

  variables {
    volume_gib = { learner = 99 }
  }
  expect_failures = [var.volume_gib]
}

run "volume_gib_refuses_fraction" {
  command = plan

  variables {
    volume_gib = { replay = 40.5 }
  }
  expect_failures = [var.volume_gib]
}
