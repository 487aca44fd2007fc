# Each variable refuses what it cannot mean. tests/test_deploy_terraform.py holds that none is left out here.

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

run "name_refuses_length" {
  command = plan

  variables {
    name = "a-name-that-is-too-long"
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

run "cpu_image_id_refuses_name" {
  command = plan

  variables {
    cpu_image_id = "ubuntu"
  }
  expect_failures = [var.cpu_image_id]
}

run "gpu_image_id_refuses_digits" {
  command = plan

  variables {
    gpu_image_id = "ami-xyz"
  }
  expect_failures = [var.gpu_image_id]
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

run "settings_refuses_run_directory" {
  command = plan

  variables {
    settings = { run_directory = "/" }
  }
  expect_failures = [var.settings]
}

run "ladder_environments_refuses_zero" {
  command = plan

  variables {
    ladder_environments = 0
  }
  expect_failures = [var.ladder_environments]
}

run "ladder_environments_refuses_fraction" {
  command = plan

  variables {
    ladder_environments = 1.5
  }
  expect_failures = [var.ladder_environments]
}

run "actor_hosts_refuses_negative" {
  command = plan

  variables {
    actor_hosts = -1
  }
  expect_failures = [var.actor_hosts]
}

run "actor_hosts_refuses_fraction" {
  command = plan

  variables {
    actor_hosts = 2.5
  }
  expect_failures = [var.actor_hosts]
}

run "actor_hosts_refuses_thousand" {
  command = plan

  variables {
    actor_hosts = 1001
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

run "instance_types_refuses_type" {
  command = plan

  variables {
    instance_types = { actor = ["large"] }
  }
  expect_failures = [var.instance_types]
}

run "vpc_id_refuses_word" {
  command = plan

  variables {
    vpc_id = "default"
  }
  expect_failures = [var.vpc_id]
}

run "subnet_ids_refuses_block" {
  command = plan

  variables {
    subnet_ids = ["10.0.0.0/24"]
  }
  expect_failures = [var.subnet_ids]
}

run "endpoints_security_group_id_refuses_word" {
  command = plan

  variables {
    endpoints_security_group_id = "default"
  }
  expect_failures = [var.endpoints_security_group_id]
}

run "vpc_cidr_refuses_wide" {
  command = plan

  variables {
    vpc_cidr = "10.0.0.0/8"
  }
  expect_failures = [var.vpc_cidr]
}

run "vpc_cidr_refuses_no_mask" {
  command = plan

  variables {
    vpc_cidr = "10.0.0.0"
  }
  expect_failures = [var.vpc_cidr]
}

run "vpc_cidr_refuses_narrow" {
  command = plan

  variables {
    vpc_cidr = "10.0.0.0/28"
  }
  expect_failures = [var.vpc_cidr]
}

run "zones_refuses_four" {
  command = plan

  variables {
    zones = 4
  }
  expect_failures = [var.zones]
}

run "bucket_refuses_name" {
  command = plan

  variables {
    bucket = "Not_A_Bucket"
  }
  expect_failures = [var.bucket]
}

run "bucket_kms_key_arn_refuses_alias" {
  command = plan

  variables {
    bucket_kms_key_arn = "alias/mine"
  }
  expect_failures = [var.bucket_kms_key_arn]
}

run "log_retention_days_refuses_odd" {
  command = plan

  variables {
    log_retention_days = 31
  }
  expect_failures = [var.log_retention_days]
}

run "alarm_email_refuses_no_at" {
  command = plan

  variables {
    alarm_email = "nobody"
  }
  expect_failures = [var.alarm_email]
}

run "monthly_budget_usd_refuses_negative" {
  command = plan

  variables {
    monthly_budget_usd = -5
  }
  expect_failures = [var.monthly_budget_usd]
}

run "permissions_boundary_arn_refuses_name" {
  command = plan

  variables {
    permissions_boundary_arn = "PowerUser"
  }
  expect_failures = [var.permissions_boundary_arn]
}

run "tags_refuses_reserved" {
  command = plan

  variables {
    tags = { "aws:owner" = "x" }
  }
  expect_failures = [var.tags]
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
