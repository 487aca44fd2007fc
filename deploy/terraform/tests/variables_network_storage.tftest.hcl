# Like variables.tftest.hcl, for the variables of network, storage, keys and watching.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit = "0123456789abcdef0123456789abcdef01234567"
}

run "existing_endpoints_refuses_service" {
  command = plan

  variables {
    existing_endpoints = ["ec2"]
  }
  expect_failures = [var.existing_endpoints]
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

run "zone_names_refuses_letter" {
  command = plan

  variables {
    zone_names = ["a"]
  }
  expect_failures = [var.zone_names]
}

run "zone_names_refuses_local_zone" {
  command = plan

  variables {
    zone_names = ["us-east-1-bos-1a"]
  }
  expect_failures = [var.zone_names]
}

run "zone_names_refuses_twice" {
  command = plan

  variables {
    zone_names = ["us-east-1a", "us-east-1a"]
  }
  expect_failures = [var.zone_names]
}

run "zone_names_refuses_four" {
  command = plan

  variables {
    zone_names = ["us-east-1a", "us-east-1b", "us-east-1c", "us-east-1d"]
  }
  expect_failures = [var.zone_names]
}

run "log_retention_days_refuses_odd" {
  command = plan

  variables {
    log_retention_days = 31
  }
  expect_failures = [var.log_retention_days]
}

run "monthly_budget_usd_refuses_negative" {
  command = plan

  variables {
    monthly_budget_usd = -5
  }
  expect_failures = [var.monthly_budget_usd]
}

run "tags_refuses_reserved" {
  command = plan

  variables {
    tags = { "aws:owner" = "x" }
  }
  expect_failures = [var.tags]
}

run "tags_refuses_project" {
  command = plan

  variables {
    tags = { Project = "x" }
  }
  expect_failures = [var.tags]
}

run "tags_refuses_fleet" {
  command = plan

  variables {
    tags = { fleet = "x" }
  }
  expect_failures = [var.tags]
}

run "tags_refuses_role" {
  command = plan

  variables {
    tags = { ROLE = "x" }
  }
  expect_failures = [var.tags]
}

run "tags_refuses_name" {
  command = plan

  variables {
    tags = { Name = "x" }
  }
  expect_failures = [var.tags]
}
