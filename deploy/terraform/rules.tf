# Conditions that involve several variables. (A variable's own validation can refer to others only since Terraform 1.9.)

resource "terraform_data" "rules" {
  lifecycle {
    precondition {
      condition     = terraform_data.fleet.output == { name = var.name, region = var.region }
      error_message = "This state is of the fleet ${terraform_data.fleet.output.name} in ${terraform_data.fleet.output.region}, not of ${var.name} in ${var.region}, and would forget it: give -var name=${terraform_data.fleet.output.name} -var region=${terraform_data.fleet.output.region}, or destroy that fleet first."
    }
    precondition {
      condition     = anytrue([for key in ["total_minutes", "total_updates", "total_environment_frames"] : try(tonumber(local.settings[key]) > 0, false)])
      error_message = "settings: nothing ends this run, so the fleet would cost without end: give total_minutes above 0, such as settings = { total_minutes = \"600\" }, or total_updates, or total_environment_frames."
    }
    precondition {
      condition     = local.own_vpc == (length(var.subnet_ids) == 0)
      error_message = "vpc_id and subnet_ids go together: give both for an existing VPC, none for an own one."
    }
    precondition {
      condition     = local.own_vpc || length(var.zone_names) == 0
      error_message = "zone_names is for the fleet's own VPC; in an existing one the subnets say the zones (subnet_ids)."
    }
    precondition {
      condition     = length(setsubtract(var.zone_names, data.aws_availability_zones.available.names)) == 0
      error_message = "zone_names: the region has only ${join(", ", data.aws_availability_zones.available.names)}."
    }
    precondition {
      condition     = !local.own_vpc || length(var.zone_names) > 0 || length(data.aws_availability_zones.available.names) >= var.zones
      error_message = "zones: the region has only ${join(", ", data.aws_availability_zones.available.names)}."
    }
    precondition {
      condition     = length(local.roles_without_type) == 0
      error_message = "The zone ${local.zone_names[0]} has no instance type of ${join(" and ", local.roles_without_type)}: name another zone first (zone_names), or other types (instance_types)."
    }
    precondition {
      condition     = !local.own_vpc || local.hosts_at_most <= local.hosts_fitting[local.cidr_prefix]
      error_message = "vpc_cidr: ${var.vpc_cidr} has addresses for ${local.hosts_fitting[local.cidr_prefix]} hosts in ${length(local.zone_names)} zones, and there may be ${local.hosts_at_most} at once: give a /${local.prefix_needed} or wider before the first apply (later it makes a new VPC: destroy first), or fewer actor_hosts."
    }
    precondition {
      condition     = local.ladder_environments >= local.actor_host_environments
      error_message = "ladder_environments: ${local.ladder_environments} places for the ${local.actor_host_environments} environments of one actor host (actor_host_environments), which each need one."
    }
    precondition {
      condition     = local.ladder_environments >= local.replay_hosts
      error_message = "replay_hosts: ${local.replay_hosts} replay servers for ${local.ladder_environments} environments (ladder_environments), of which each needs one: give fewer."
    }
    precondition {
      condition     = local.actor_hosts == 0 || local.actor_hosts >= local.replay_hosts
      error_message = "actor_hosts: ${local.actor_hosts} hosts for ${local.replay_hosts} replay servers (replay_hosts), of which each needs an actor host: give at least ${local.replay_hosts}."
    }
    precondition {
      condition     = local.replay_hosts % max(1, local.learner_devices) == 0
      error_message = "learner_devices: ${local.learner_devices} GPUs do not divide replay_hosts = ${local.replay_hosts}, of which each needs as many as the others: give replay_hosts = ${local.learner_devices}, or fewer GPUs."
    }
    precondition {
      condition     = local.finds_interfaces == (var.endpoints_security_group_id != "")
      error_message = "endpoints_security_group_id is for endpoints that the VPC has (create_endpoints = false, existing_endpoints), and needed there."
    }
    precondition {
      condition     = var.create_endpoints || !local.own_vpc
      error_message = "create_endpoints = false needs an existing VPC (vpc_id): a VPC of its own has no other way to AWS."
    }
    precondition {
      condition     = length(var.existing_endpoints) == 0 || (var.create_endpoints && !local.own_vpc)
      error_message = "existing_endpoints are of an existing VPC (vpc_id), and beside create_endpoints = true: without it, all exist."
    }
    precondition {
      condition     = (length(var.route_table_ids) > 0) == (!local.own_vpc && contains(local.services_made, "s3"))
      error_message = "route_table_ids is for S3's endpoint in an existing VPC, and needed there, unless it has one (existing_endpoints, create_endpoints)."
    }
    precondition {
      condition     = alltrue([for bucket in data.aws_s3_bucket.given : bucket.region == var.region])
      error_message = "bucket: ${var.bucket} is in ${join("", data.aws_s3_bucket.given[*].region)}, and hosts reach only buckets of ${var.region}: make one there, and copy (aws s3 sync), or run the fleet where the bucket is (region)."
    }
    precondition {
      condition     = var.bucket != "" || var.bucket_kms_key_arn == ""
      error_message = "bucket_kms_key_arn is for an existing bucket (bucket); the fleet's own has the fleet's key."
    }
    precondition {
      condition     = var.monthly_budget_usd == 0 || var.alarm_email != ""
      error_message = "monthly_budget_usd needs alarm_email: a budget that writes to nobody warns nobody."
    }
  }
}

# The fleet that was applied first with this state: with another region, Terraform would find none of it.
resource "terraform_data" "fleet" {
  input = { name = var.name, region = var.region }

  lifecycle {
    ignore_changes = [input]
  }
}

# Everything that a host needs: it is created before the first host and destroyed after the last one.
resource "terraform_data" "host_needs" {
  depends_on = [
    aws_iam_role_policy.role,
    aws_route_table_association.private,
    aws_vpc_endpoint.interface,
    aws_vpc_endpoint.s3,
    aws_vpc_security_group_egress_rule.endpoints,
    aws_vpc_security_group_egress_rule.link,
    aws_vpc_security_group_egress_rule.s3,
    aws_vpc_security_group_ingress_rule.endpoints,
    aws_vpc_security_group_ingress_rule.link,
  ]
}
