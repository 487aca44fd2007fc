# The zones of hosts, and an existing VPC. deploy/tests/test_apply.py has the rules of an applied fleet.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit         = "0123456789abcdef0123456789abcdef01234567"
  delete_results = true # so that the test can delete what it creates
}

run "one_zone" {
  assert {
    condition = join(",", keys(aws_subnet.private)) == "us-east-1a" && alltrue([
      for host in [module.replay[0], module.learner, module.actor, module.evaluator[0]] :
      host.group.subnet_ids == toset([aws_subnet.private["us-east-1a"].id])
    ])
    error_message = "Unless more are named, all hosts are in the region's first zone, where traffic between them is free."
  }
}

run "zones_by_name" {
  variables {
    zone_names = ["us-east-1c", "us-east-1a"]
  }

  assert {
    condition     = { for zone, subnet in aws_subnet.private : zone => "${subnet.availability_zone} ${subnet.cidr_block}" } == { us-east-1a = "us-east-1a 10.83.0.0/19", us-east-1c = "us-east-1c 10.83.64.0/19" }
    error_message = "The zones are those named, each with the addresses of its letter."
  }
  assert {
    condition = (
      module.replay[0].group.subnet_ids == toset([aws_subnet.private["us-east-1c"].id]) &&
      module.learner.group.subnet_ids == toset([aws_subnet.private["us-east-1c"].id]) &&
      module.actor.group.subnet_ids == toset([aws_subnet.private["us-east-1a"].id, aws_subnet.private["us-east-1c"].id])
    )
    error_message = "Replay and learner are in the first zone that is named."
  }
}

run "existing_vpc" {
  variables {
    vpc_id                      = "vpc-0fedcba9876543210"
    subnet_ids                  = ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]
    endpoints_security_group_id = "sg-0123456789abcdef0"
  }

  assert {
    condition     = length(aws_vpc.fleet) + length(aws_subnet.private) + length(aws_vpc_endpoint.interface) + length(aws_vpc_endpoint.s3) == 0
    error_message = "An existing VPC is left as it is."
  }
  assert {
    condition     = alltrue([for group in values(aws_security_group.role) : group.vpc_id == "vpc-0fedcba9876543210"])
    error_message = "The groups are in the given VPC."
  }
  assert {
    condition     = module.actor.group.subnet_ids == toset(var.subnet_ids) && module.replay[0].group.subnet_ids == toset([var.subnet_ids[0]])
    error_message = "Actors are in all given subnets, the replay server in the first."
  }
  assert {
    condition     = alltrue([for rule in values(aws_vpc_security_group_egress_rule.endpoints) : rule.referenced_security_group_id == "sg-0123456789abcdef0"])
    error_message = "Hosts reach the endpoints that are there."
  }
}
