# The hosts of one role: a launch template, a group that keeps `hosts` of them alive, and the policy that ends them.

resource "aws_launch_template" "role" {
  name                   = var.settings.name
  image_id               = var.settings.image_id
  instance_type          = var.settings.instance_types[0]
  user_data              = base64encode(var.settings.user_data)
  update_default_version = true

  iam_instance_profile {
    name = var.settings.instance_profile_name
  }

  network_interfaces {
    associate_public_ip_address = false
    delete_on_termination       = true
    security_groups             = [var.settings.security_group_id]
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
      volume_size           = var.settings.volume_gib
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume", "network-interface"])

    content {
      resource_type = tag_specifications.value
      tags          = merge(var.settings.tags, { Name = var.settings.name })
    }
  }

  tags = var.settings.tags
}

resource "aws_autoscaling_group" "role" {
  name                      = var.settings.name
  min_size                  = 0 # the policy below sets the group to it
  max_size                  = var.hosts
  desired_capacity          = var.is_over ? 0 : var.hosts
  vpc_zone_identifier       = var.subnet_ids
  health_check_type         = "EC2"
  health_check_grace_period = 300
  enabled_metrics           = ["GroupDesiredCapacity", "GroupInServiceInstances"]
  metrics_granularity       = "1Minute"
  force_delete              = false

  # A replacement starts before a spot instance at risk of interruption ends.
  capacity_rebalance = var.spot_percentage > 0 && !var.only_one
  # An apply neither fails if spot capacity is short (an alarm reports that) nor waits until hosts have stopped.
  wait_for_capacity_timeout = "0"

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = 100 - var.spot_percentage
      on_demand_allocation_strategy            = "prioritized"
      spot_allocation_strategy                 = "price-capacity-optimized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.role.id
        version            = aws_launch_template.role.latest_version
      }

      dynamic "override" {
        for_each = var.settings.instance_types

        content {
          instance_type = override.value
        }
      }
    }
  }

  # AWS terminates the only host and starts the next one at the same time; the next one boots while the old one saves.
  # Without this, AWS would start the next one first when it moves a group to another zone: two learners, one name.
  dynamic "instance_maintenance_policy" {
    for_each = var.only_one ? ["terminate and launch"] : []

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
      min_healthy_percentage = var.hosts > 1 ? 50 : 0
      max_healthy_percentage = 100
      instance_warmup        = 120
      skip_matching          = true
    }
  }

  dynamic "tag" {
    for_each = merge(var.settings.tags, { Name = var.settings.name })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  tag { # what the group runs: is_over in end.tf asks for it
    key                 = "ApexJaxRun"
    value               = var.settings.run
    propagate_at_launch = false
  }
}

resource "aws_autoscaling_policy" "end" {
  name                   = "${var.settings.name}-end"
  autoscaling_group_name = aws_autoscaling_group.role.name
  adjustment_type        = "ExactCapacity"
  scaling_adjustment     = 0
  cooldown               = 60
}
