# The hosts of each role: a launch template, a group that keeps its hosts alive, and the policy that ends them.
#
#   replay     memory, and one busy core; a replacement loads its copy from the bucket
#   learner    one GPU; a replacement resumes from the newest checkpoint in the bucket
#   actor      any number of hosts, mostly spot instances; a terminated actor loses only what it has not sent yet
#   evaluator  plays full games with the newest weights; a spot instance, whose interrupted game is played again

resource "aws_launch_template" "role" {
  for_each = local.roles

  name                   = "${var.name}-${each.key}"
  image_id               = local.image_ids[each.key]
  instance_type          = local.instance_types[each.value][0]
  user_data              = base64encode(local.user_data[each.key])
  update_default_version = true

  iam_instance_profile {
    name = aws_iam_instance_profile.role[each.value].name
  }

  network_interfaces {
    associate_public_ip_address = false
    delete_on_termination       = true
    security_groups             = [aws_security_group.role[each.value].id]
  }

  metadata_options { # only IMDSv2; routed requests, such as those of containers, get no answer
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "disabled"
  }

  block_device_mappings {
    device_name = "/dev/sda1"

    ebs {
      volume_size           = local.volume_gib[each.value]
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
      # MiB/s from the image's snapshot: CUDA is read before the first update. Costs some 0.4 USD a boot.
      # Not tried on AWS: https://docs.aws.amazon.com/ebs/latest/userguide/initalize-volume.html
      volume_initialization_rate = each.value == "learner" ? 300 : null
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume", "network-interface"])

    content {
      resource_type = tag_specifications.value
      tags          = local.host_tags[each.key]
    }
  }
}

resource "aws_autoscaling_group" "role" {
  for_each = local.roles

  name                      = "${var.name}-${each.key}"
  min_size                  = 0 # the policy below sets the group to it
  max_size                  = local.hosts_of[each.value]
  desired_capacity          = local.is_over ? 0 : local.hosts_of[each.value]
  vpc_zone_identifier       = each.value == "replay" || each.value == "learner" ? local.first_subnet : local.subnet_ids
  health_check_type         = "EC2"
  health_check_grace_period = 300
  enabled_metrics           = ["GroupDesiredCapacity", "GroupInServiceInstances"]
  metrics_granularity       = "1Minute"
  force_delete              = false

  # A replacement starts before a spot instance at risk of interruption ends.
  capacity_rebalance = each.value == "actor" && var.actor_spot_percentage > 0
  # An apply neither fails if spot capacity is short (an alarm reports that) nor waits until hosts have stopped.
  wait_for_capacity_timeout = "0"

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = 100 - local.spot_percentage_of[each.value]
      on_demand_allocation_strategy            = "prioritized"
      spot_allocation_strategy                 = "price-capacity-optimized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.role[each.key].id
        version            = aws_launch_template.role[each.key].latest_version
      }

      dynamic "override" {
        for_each = local.instance_types[each.value]

        content {
          instance_type = override.value
        }
      }
    }
  }

  # AWS terminates the only host and starts the next one at the same time; the next one boots while the old one saves.
  # Without this, AWS would start the next one first when it moves a group to another zone: two learners, one name.
  dynamic "instance_maintenance_policy" {
    for_each = each.value == "actor" ? [] : ["terminate and launch"]

    content {
      min_healthy_percentage = 0
      max_healthy_percentage = 100
    }
  }

  # A new image or new settings replace the hosts; of several hosts, half stay in service meanwhile. Hosts that the same
  # apply has just started already have the new template, and stay.
  instance_refresh {
    strategy = "Rolling"

    preferences {
      min_healthy_percentage = local.hosts_of[each.value] > 1 ? 50 : 0
      max_healthy_percentage = 100
      instance_warmup        = 120
      skip_matching          = true
    }
  }

  dynamic "tag" {
    for_each = local.host_tags[each.key]

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  tag { # what the group runs: is_over in end.tf asks for it
    key                 = "ApexJaxRun"
    value               = local.run_and_end
    propagate_at_launch = false
  }

  depends_on = [ # what a host needs when it boots, and until it has ended
    aws_iam_role_policy.role,
    aws_route_table_association.private,
    aws_vpc_endpoint.interface,
    aws_vpc_endpoint.s3,
    aws_vpc_security_group_egress_rule.link,
    aws_vpc_security_group_egress_rule.s3,
    aws_vpc_security_group_ingress_rule.link,
  ]
}

resource "aws_autoscaling_policy" "end" {
  for_each = aws_autoscaling_group.role

  name                   = "${each.value.name}-end"
  autoscaling_group_name = each.value.name
  adjustment_type        = "ExactCapacity"
  # Simple scaling waits for a replacement that is under way. Not tried on AWS:
  # https://docs.aws.amazon.com/autoscaling/ec2/userguide/as-scaling-simple-step.html
  policy_type = "StepScaling"

  step_adjustment { # above the threshold of an alarm, and below it
    metric_interval_lower_bound = "0"
    scaling_adjustment          = 0
  }
  step_adjustment {
    metric_interval_upper_bound = "0"
    scaling_adjustment          = 0
  }
}

locals {
  first_subnet = slice(local.subnet_ids, 0, min(1, length(local.subnet_ids))) # replay and learner side by side
  host_tags = {
    for role in local.roles : role => merge(
      { Name = "${var.name}-${role}", Project = "apex-jax", Fleet = var.name, Role = role }, var.tags
    )
  }
}
