# Which hosts can connect to which; none from outside can connect.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit         = "0123456789abcdef0123456789abcdef01234567"
  delete_results = true # so that the test can delete what it creates
}

run "links" {
  assert {
    condition = {
      for name, rule in aws_vpc_security_group_ingress_rule.link : name => "${rule.ip_protocol} ${rule.from_port}-${rule.to_port}"
      } == {
      actor-experience  = "tcp 5550-5550"
      learner-sampling  = "tcp 5551-5551"
      actor-weights     = "tcp 5552-5552"
      evaluator-weights = "tcp 5552-5552"
    }
    error_message = "The links between hosts are these four and no others."
  }

  assert {
    condition = alltrue([
      for pair in [
        ["actor-experience", "actor", "replay"], ["learner-sampling", "learner", "replay"],
        ["actor-weights", "actor", "learner"], ["evaluator-weights", "evaluator", "learner"],
      ] :
      aws_vpc_security_group_ingress_rule.link[pair[0]].referenced_security_group_id == aws_security_group.role[pair[1]].id
      && aws_vpc_security_group_ingress_rule.link[pair[0]].security_group_id == aws_security_group.role[pair[2]].id
      && aws_vpc_security_group_egress_rule.link[pair[0]].referenced_security_group_id == aws_security_group.role[pair[2]].id
      && aws_vpc_security_group_egress_rule.link[pair[0]].security_group_id == aws_security_group.role[pair[1]].id
    ])
    error_message = "A link leads from its client's group to its server's, on both sides."
  }

  assert {
    condition = alltrue([
      for rule in concat(
        values(aws_vpc_security_group_ingress_rule.link), values(aws_vpc_security_group_egress_rule.link),
        values(aws_vpc_security_group_ingress_rule.endpoints), values(aws_vpc_security_group_egress_rule.endpoints),
        values(aws_vpc_security_group_egress_rule.s3),
      ) : rule.cidr_ipv4 == null && rule.cidr_ipv6 == null && rule.from_port == rule.to_port
    ])
    error_message = "No rule names an address or a range of ports."
  }

  assert {
    condition     = toset(keys(aws_vpc_security_group_egress_rule.s3)) == toset(["replay", "learner", "evaluator"])
    error_message = "Actors store nothing, so they have no way to S3."
  }

  assert {
    condition     = alltrue([for rule in values(aws_vpc_security_group_egress_rule.endpoints) : rule.from_port == 443])
    error_message = "AWS is reached over TLS."
  }
}

run "private" {
  assert {
    condition     = length(aws_subnet.private) == 2 && alltrue([for subnet in aws_subnet.private : !subnet.map_public_ip_on_launch])
    error_message = "Subnets are private."
  }
  assert {
    condition = alltrue([
      for template in [module.replay[0].template, module.learner.template, module.actor.template, module.evaluator[0].template] :
      template.network_interface.associate_public_ip_address == "false"
    ])
    error_message = "No host has a public address."
  }
  assert {
    condition     = length(aws_default_security_group.unused[0].ingress) == 0 && length(aws_default_security_group.unused[0].egress) == 0
    error_message = "The default group lets nothing through."
  }
  assert {
    condition     = toset(keys(aws_vpc_endpoint.interface)) == toset(["logs", "monitoring", "servicediscovery", "ssm", "ssmmessages"])
    error_message = "These are the APIs that hosts use."
  }
}

run "names_of_two_replay_servers" {
  variables {
    replay_hosts = 2
  }

  assert {
    condition = { for name, service in aws_service_discovery_service.host : name => service.name } == {
      replay = "replay", replay-1 = "replay-1", learner = "learner"
    }
    error_message = "Each replay server has a name of its own."
  }
  assert {
    condition = length(aws_vpc_security_group_ingress_rule.link) == 4 && alltrue([
      for host in module.replay : host.template.network_interface.security_groups == toset([aws_security_group.role["replay"].id])
    ])
    error_message = "All replay servers are in one security group, to which the links lead."
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

run "zones_by_number" {
  variables {
    zones = 3
  }

  assert {
    condition     = toset(keys(aws_subnet.private)) == toset(["us-east-1a", "us-east-1b", "us-east-1c"])
    error_message = "Without names, the zones are the region's first."
  }
}

run "narrow_vpc_that_is_just_wide_enough" {
  variables {
    vpc_cidr    = "10.83.0.0/24"
    actor_hosts = 37 # 2 zones of 32 addresses, minus 5 of AWS and 5 of endpoints each: 37 + 3 hosts, and 4 successors
  }

  assert {
    condition     = { for zone, subnet in aws_subnet.private : zone => subnet.cidr_block } == { us-east-1a = "10.83.0.0/27", us-east-1b = "10.83.0.32/27" }
    error_message = "What fits is not refused."
  }
  assert {
    condition     = local.prefix_needed == 24
    error_message = "The block that would be asked for is no wider than it must be."
  }
}

run "existing_vpc" {
  variables {
    vpc_id                      = "vpc-0fedcba9876543210"
    subnet_ids                  = ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]
    create_endpoints            = false
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

run "existing_vpc_that_gets_endpoints" {
  variables {
    vpc_id          = "vpc-0fedcba9876543210"
    subnet_ids      = ["subnet-0123456789abcdef0"]
    route_table_ids = ["rtb-0123456789abcdef0", "rtb-0123456789abcdef1"]
  }

  assert {
    condition     = toset(keys(aws_vpc_endpoint.interface)) == toset(["logs", "monitoring", "servicediscovery", "ssm", "ssmmessages"])
    error_message = "All APIs that hosts use have their endpoint."
  }
  assert {
    condition = (
      aws_vpc_endpoint.s3[0].vpc_id == "vpc-0fedcba9876543210" && aws_vpc_endpoint.s3[0].vpc_endpoint_type == "Gateway" &&
      aws_vpc_endpoint.s3[0].route_table_ids == toset(["rtb-0123456789abcdef0", "rtb-0123456789abcdef1"])
    )
    error_message = "S3 has its endpoint, too, in the given route tables: without it no checkpoint is stored."
  }
  assert {
    condition     = length(aws_vpc_security_group_egress_rule.endpoints) == 4 && length(aws_vpc_security_group_ingress_rule.endpoints) == 4
    error_message = "Each role reaches the endpoints that are made."
  }
}

run "existing_vpc_that_has_some_endpoints" {
  variables {
    vpc_id                      = "vpc-0fedcba9876543210"
    subnet_ids                  = ["subnet-0123456789abcdef0"]
    existing_endpoints          = ["s3", "ssm", "ssmmessages"]
    endpoints_security_group_id = "sg-0123456789abcdef0"
  }

  assert {
    condition     = toset(keys(aws_vpc_endpoint.interface)) == toset(["logs", "monitoring", "servicediscovery"]) && length(aws_vpc_endpoint.s3) == 0
    error_message = "What is there is not made again: a second private name for it is refused by AWS."
  }
  assert {
    condition = alltrue([
      for way in [aws_vpc_security_group_egress_rule.endpoints, aws_vpc_security_group_ingress_rule.endpoints] :
      toset(keys(way)) == toset([for pair in setproduct(["made", "found"], ["replay", "learner", "actor", "evaluator"]) : join("-", pair)])
    ])
    error_message = "Each role may reach both groups of endpoints, and each group lets it in."
  }
  assert {
    condition = alltrue([
      for role in ["replay", "learner", "actor", "evaluator"] :
      aws_vpc_security_group_ingress_rule.endpoints["found-${role}"].security_group_id == "sg-0123456789abcdef0" &&
      aws_vpc_security_group_egress_rule.endpoints["found-${role}"].referenced_security_group_id == "sg-0123456789abcdef0" &&
      aws_vpc_security_group_ingress_rule.endpoints["made-${role}"].security_group_id == aws_security_group.endpoints[0].id &&
      aws_vpc_security_group_egress_rule.endpoints["made-${role}"].referenced_security_group_id == aws_security_group.endpoints[0].id &&
      aws_vpc_security_group_ingress_rule.endpoints["found-${role}"].referenced_security_group_id == aws_security_group.role[role].id
    ])
    error_message = "Made endpoints have the fleet's group, found ones the one that was given."
  }
}

run "existing_vpc_that_lacks_only_the_endpoint_of_s3" {
  variables {
    vpc_id                      = "vpc-0fedcba9876543210"
    subnet_ids                  = ["subnet-0123456789abcdef0"]
    route_table_ids             = ["rtb-0123456789abcdef0"]
    existing_endpoints          = ["logs", "monitoring", "servicediscovery", "ssm", "ssmmessages"]
    endpoints_security_group_id = "sg-0123456789abcdef0"
  }

  assert {
    condition     = length(aws_vpc_endpoint.interface) == 0 && length(aws_security_group.endpoints) == 0 && length(aws_vpc_endpoint.s3) == 1
    error_message = "Only S3's is made, which needs no group."
  }
}
