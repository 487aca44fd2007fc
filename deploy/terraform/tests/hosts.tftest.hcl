# Hosts: presets, groups, disks, user data, zones, and what they cost, against a calculation by hand (README.md shows the
# same numbers). deploy/tests/test_apply.py has the rules of an applied fleet.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit         = "0123456789abcdef0123456789abcdef01234567"
  alarm_email    = "someone@example.org"
  delete_results = true # so that the test can delete what it creates
}

# US dollars of a month: 814.40 instances, which are 730 h x (0.1323 + 0.8048 + 2 x 0.1785 x 0.4 + 0.0893 x 0.4); 16.00 for
# 200 GiB of disks; 36.50 for 5 endpoints; 5.50 key, private zone and snapshots. Together 872.40, of which an hour is 1.20.
run "small" {
  assert {
    condition     = output.estimated_usd == { hour = "1.20", month = "872", month_stopped = "6", prices = "us-east-1, 2026-11" }
    error_message = "An hour and a month of small cost as by hand: not ${jsonencode(output.estimated_usd)}."
  }
  assert {
    condition = {
      for role, group in aws_autoscaling_group.role : role => join(" ", [
        group.desired_capacity, group.max_size, group.mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity,
        group.mixed_instances_policy[0].launch_template[0].override[0].instance_type, length(group.instance_maintenance_policy),
        group.instance_refresh[0].preferences[0].min_healthy_percentage, group.capacity_rebalance
      ])
      } == {
      replay    = "1 1 100 r7i.large 1 0 false"
      learner   = "1 1 100 g6.xlarge 1 0 false"
      evaluator = "1 1 0 c7i.large 1 0 false"
      actor     = "2 2 0 c7i.xlarge 0 50 true"
    }
    error_message = "Replay and learner are groups of one at most, on demand; actors are spot instances, half of which stay while the others are replaced."
  }
  assert {
    condition = strcontains(output.user_data.learner, "learner.device=gpu") && alltrue([
      for text in values(output.user_data) : strcontains(text, "security.keys=/etc/apex-jax/keys") && strcontains(text, "addresses.status=tcp://127.0.0.1:5559 ")
    ])
    error_message = "A learner without its GPU fails instead of going on with the CPU; every link has keys; the status is for the host itself."
  }
}

run "changing_the_number_of_actors_changes_no_host" {
  variables {
    actor_hosts = 9
  }

  assert {
    condition     = output.user_data == run.small.user_data
    error_message = "The number of actors must be in nobody's user data: it would replace every host."
  }
}

# 1584.39 instances, 27.20 disks, 36.50 endpoints, 5.50 as above: together 1653.59, an hour 2.27.
run "paper_with_a_limit_and_a_setting_of_ones_own" {
  variables {
    size     = "paper"
    settings = { "learner.batch_size" = "1024", "total_updates" = "100000" }
  }

  assert {
    condition     = output.estimated_usd == { hour = "2.27", month = "1654", month_stopped = "6", prices = "us-east-1, 2026-11" }
    error_message = "An hour and a month of paper cost as by hand: not ${jsonencode(output.estimated_usd)}."
  }
  assert {
    condition     = aws_autoscaling_group.role["actor"].desired_capacity * local.actor_host_environments >= 360 && local.ladder_environments == 360
    error_message = "The preset paper has the paper's 360 environments."
  }
  assert {
    condition     = strcontains(output.user_data.learner, "configs/paper.yaml") && strcontains(output.user_data.actor, "actor.ladder_size=360")
    error_message = "The preset paper runs configs/paper.yaml, with the ladder of all its environments."
  }
  assert {
    condition = strcontains(output.user_data.learner, "learner.batch_size=1024 ") && strcontains(output.user_data.learner, "total_updates=100000") && (
      !strcontains(output.user_data.learner, "total_minutes")
    )
    error_message = "A given setting is added to those of the preset, and a given limit replaces its minutes, which might end the run sooner."
  }
}

run "variables_override_the_preset" {
  variables {
    actor_hosts             = 0
    actor_host_environments = 16
    actor_spot_percentage   = 50
    ladder_environments     = 17
    evaluator               = false
    config_file             = "catch.yaml"
    instance_types          = { actor = ["c9x.large"] }
    settings                = { "seed" = "3", "replay.priority_exponent" = "0" }
    volume_gib              = { replay = 1040 }
  }

  assert {
    condition     = startswith(output.estimated_usd.hour, "unknown") && startswith(output.estimated_usd.month, "unknown")
    error_message = "The price of a type that is not in prices.tf is not made up: ${jsonencode(output.estimated_usd)}."
  }
  assert {
    condition     = aws_autoscaling_group.role["actor"].max_size == 0 && aws_autoscaling_group.role["evaluator"].max_size == 0
    error_message = "Nought actors are nought, not the preset's number."
  }
  assert {
    condition = [
      for policy in aws_autoscaling_group.role["actor"].mixed_instances_policy :
      "${policy.instances_distribution[0].on_demand_percentage_above_base_capacity} ${join(",", policy.launch_template[0].override[*].instance_type)}"
    ] == ["50 c9x.large"]
    error_message = "Types and their mix are as given."
  }
  assert {
    condition     = join(" ", [for role, template in aws_launch_template.role : template.block_device_mappings[0].ebs[0].volume_size]) == "20 20 100 1040"
    error_message = "Roles that are named have the given disk, the others the preset's."
  }
  assert {
    condition = alltrue([
      for word in ["seed=3", "replay.priority_exponent=0", "actor.ladder_size=17", "configs/catch.yaml"] : strcontains(output.user_data.replay, word)
    ])
    error_message = "Settings reach the roles."
  }
}

run "stopped_without_its_images" {
  command = plan

  variables {
    running = false
  }
  override_data {
    target = data.aws_ami_ids.own
    values = { ids = [] }
  }
  override_data {
    target = data.aws_launch_template.before
    values = { image_id = "ami-0123456789abcdef0" }
  }

  assert {
    condition     = toset(values(aws_launch_template.role)[*].image_id) == toset(["ami-0123456789abcdef0"])
    error_message = "The launch templates stay as they are."
  }
  assert {
    condition     = sum(values(aws_autoscaling_group.role)[*].max_size) == 0
    error_message = "No instance runs."
  }
  assert {
    condition     = length(aws_vpc_endpoint.interface) + length(aws_cloudwatch_metric_alarm.health) + length(aws_cloudwatch_metric_alarm.end) + length(aws_cloudwatch_metric_alarm.actors_missing) == 0
    error_message = "Nothing that costs by the hour is left, and no alarm cries."
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
      aws_autoscaling_group.role["replay"].vpc_zone_identifier == toset([aws_subnet.private["us-east-1c"].id]) &&
      aws_autoscaling_group.role["learner"].vpc_zone_identifier == toset([aws_subnet.private["us-east-1c"].id]) &&
      aws_autoscaling_group.role["actor"].vpc_zone_identifier == toset([aws_subnet.private["us-east-1a"].id, aws_subnet.private["us-east-1c"].id])
    )
    error_message = "Replay and learner are in the first zone that is named."
  }
}

run "another_name_with_the_same_state_is_refused" {
  command = plan

  variables {
    name = "blue"
  }
  expect_failures = [terraform_data.rules]
}
