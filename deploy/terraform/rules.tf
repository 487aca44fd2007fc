# Conditions that involve several variables. (A variable's own validation can refer to others only since Terraform 1.9.)

resource "terraform_data" "rules" {
  lifecycle {
    precondition {
      condition     = terraform_data.fleet.output == { name = var.name, region = var.region }
      error_message = "This state is of the fleet ${terraform_data.fleet.output.name} in ${terraform_data.fleet.output.region}, not of ${var.name} in ${var.region}, and would forget it: give -var name=${terraform_data.fleet.output.name} -var region=${terraform_data.fleet.output.region}, or destroy that fleet first."
    }
    precondition {
      condition     = local.has_images || !var.running
      error_message = "There are no two images of the commit ${var.commit} in ${var.region}: make them, packer build -var commit=${var.commit} deploy/packer. To stop a fleet whose images are gone: -var running=false."
    }
    precondition {
      condition     = anytrue([for key in local.bounds : try(tonumber(local.settings[key]) > 0, false)])
      error_message = "settings: nothing ends this run: give total_minutes above 0, such as settings = { total_minutes = \"600\" }, or total_updates, or total_environment_frames."
    }
    precondition {
      condition     = length(local.wrong_numbers) == 0
      error_message = join(" ", local.wrong_numbers)
    }
    precondition {
      condition     = !var.running || length(local.zone_names) > 0 && length(setsubtract(local.zone_names, local.usable_zones)) == 0
      error_message = "zone_names: the zones of ${var.region} that have every endpoint of the fleet are: ${join(", ", local.usable_zones)}."
    }
    precondition {
      condition     = !var.running || length(local.roles_without_type) == 0
      error_message = "The zone ${local.zone_names[0]} has no instance type of ${join(" and ", local.roles_without_type)}: name another zone first (zone_names), or other types (instance_types)."
    }
    precondition {
      condition     = local.ladder_environments >= local.actor_host_environments
      error_message = "ladder_environments: ${local.ladder_environments} places for the ${local.actor_host_environments} environments of one actor host (actor_host_environments), which each need one."
    }
    precondition {
      condition     = alltrue([for bucket in data.aws_s3_bucket.given : bucket.region == var.region])
      error_message = "bucket: ${var.bucket} is in ${join("", data.aws_s3_bucket.given[*].region)}, and hosts reach only buckets of ${var.region}: make one there, and copy (aws s3 sync), or run the fleet where the bucket is (region)."
    }
  }
}

locals {
  numbers = { # the value, the least, the most: those of the program
    ladder_environments     = [local.ladder_environments, 1, 1048576]
    actor_hosts             = [local.actor_hosts, 0, 1000]
    actor_host_environments = [local.actor_host_environments, 1, 4096]
  }
  wrong_numbers = [
    for name, its in local.numbers : "${name} = ${its[0]}: give a whole number from ${its[1]} to ${its[2]}."
    if floor(its[0]) != its[0] || its[0] < its[1] || its[0] > its[2]
  ]
}

# The fleet that was applied first with this state: with another region, Terraform would find none of it.
resource "terraform_data" "fleet" {
  input = { name = var.name, region = var.region }

  lifecycle {
    ignore_changes = [input]
  }
}
