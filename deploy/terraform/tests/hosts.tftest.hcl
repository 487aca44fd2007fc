# Hosts: presets, groups, disks, metadata service, user data.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit         = "0123456789abcdef0123456789abcdef01234567"
  delete_results = true # so that the test can delete what it creates
}

run "small" {
  assert {
    condition     = module.actor.group.hosts == 2 && module.learner.group.instance_types[0] == "g6.xlarge"
    error_message = "The preset small has two actor hosts and a small GPU."
  }
  assert {
    condition     = module.replay[0].group.hosts == 1 && module.replay[0].group.max_size == 1 && module.learner.group.hosts == 1 && module.learner.group.max_size == 1
    error_message = "Replay and learner are groups of one at most."
  }
  assert {
    condition = (
      module.replay[0].group.distribution.on_demand_percentage_above_base_capacity == 100 && !module.replay[0].group.capacity_rebalance &&
      module.learner.group.distribution.on_demand_percentage_above_base_capacity == 100 && !module.learner.group.capacity_rebalance
    )
    error_message = "Replay and learner are on demand."
  }
  assert {
    condition = (
      module.actor.group.distribution.on_demand_percentage_above_base_capacity == 0 && module.actor.group.capacity_rebalance &&
      module.actor.group.distribution.spot_allocation_strategy == "price-capacity-optimized" && length(module.actor.group.instance_types) >= 4
    )
    error_message = "Actors are spot instances of several types, replaced before they go."
  }
  assert {
    condition = alltrue([
      for group in [module.replay[0].group, module.learner.group, module.evaluator[0].group] :
      group.maintenance.min_healthy_percentage == 0 && group.maintenance.max_healthy_percentage == 100 && !group.capacity_rebalance
    ]) && module.actor.group.maintenance == null
    error_message = "Where there is one host, AWS starts no second before it has told the first to go."
  }
  assert {
    condition = alltrue([
      for group in [module.replay[0].group, module.learner.group, module.actor.group, module.evaluator[0].group] :
      group.refresh.skip_matching && group.refresh.min_healthy_percentage == (group.hosts > 1 ? 50 : 0) && group.refresh.max_healthy_percentage == 100
    ])
    error_message = "A new template replaces the hosts that are not of it: of several half at a time, of one never a second beside it."
  }
}

run "paper" {
  variables {
    size = "paper"
  }

  assert {
    condition     = module.actor.group.hosts * local.actor_host_environments >= 360 && local.ladder_environments == 360
    error_message = "The preset paper has the paper's 360 environments."
  }
  assert {
    condition     = strcontains(output.user_data.learner, "configs/paper.yaml") && strcontains(output.user_data.actor, "actor.ladder_size=360")
    error_message = "The preset paper runs configs/paper.yaml, with the ladder of all its environments."
  }
}

run "large" {
  variables {
    size = "large"
  }

  assert {
    condition     = length(module.replay) == 4 && module.actor.group.hosts * local.actor_host_environments == local.ladder_environments
    error_message = "The preset large has four replay servers, and a place on the ladder for each environment."
  }
  assert {
    condition = module.learner.group.instance_types[0] == "g6.12xlarge" && alltrue([
      for word in ["learner.devices=4 ", "learner.batch_size=2048 ", "replay.capacity_transitions=8000000 ", "replay.servers=4 "] :
      strcontains(output.user_data.learner, word)
    ])
    error_message = "The learner has four GPUs, of which each has the batch and the transitions of the paper's one."
  }
}

run "settings_of_the_preset_can_be_changed_one_by_one" {
  variables {
    size     = "large"
    settings = { "learner.batch_size" = "1024", "total_updates" = "100000" }
  }

  assert {
    condition     = strcontains(output.user_data.learner, "learner.batch_size=1024 ") && strcontains(output.user_data.learner, "replay.capacity_transitions=8000000 ")
    error_message = "A given setting replaces that of the preset, and the others stay."
  }
  assert {
    condition     = !strcontains(output.user_data.learner, "total_minutes") && strcontains(output.user_data.learner, "total_updates=100000")
    error_message = "A given limit replaces the preset's minutes, which might end the run sooner."
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
  }

  assert {
    condition     = module.actor.group.hosts == 0 && length(module.evaluator) == 0
    error_message = "Nought actors are nought, not the preset's number."
  }
  assert {
    condition     = module.actor.group.distribution.on_demand_percentage_above_base_capacity == 50 && join(",", module.actor.group.instance_types) == "c9x.large"
    error_message = "Types and their mix are as given."
  }
  assert {
    condition = alltrue([
      for word in ["seed=3", "replay.priority_exponent=0", "actor.ladder_size=17", "configs/catch.yaml"] : strcontains(output.user_data.replay, word)
    ])
    error_message = "Settings reach the roles."
  }
}

run "disks_are_as_large_as_said" {
  variables {
    volume_gib = { replay = 1040, learner = 100 }
  }

  assert {
    condition     = join(" ", [for host in [module.replay[0], module.learner, module.actor, module.evaluator[0]] : host.volume_gib]) == "1040 100 20 20"
    error_message = "Roles that are named have the given disk, the others the preset's."
  }
}

run "types_of_x86_of_any_name" {
  variables {
    instance_types = {
      replay    = ["r7i.large", "u7i-12tb.224xlarge", "u-6tb1.56xlarge", "x2iedn.xlarge"]
      learner   = ["g4dn.xlarge", "g5.xlarge", "g6.xlarge", "g6e.xlarge", "gr6.4xlarge", "g7e.2xlarge", "p4de.24xlarge", "p5en.48xlarge", "p6-b200.48xlarge"]
      actor     = ["c7i-flex.large", "m7i-flex.large", "c9x.large", "t3a.large", "g6.xlarge", "i7ie.large"]
      evaluator = ["t3.large"]
    }
  }

  assert {
    condition     = alltrue([for role, types in var.instance_types : toset(local.group[role].instance_types) == toset(types)])
    error_message = "A g in a name is not enough to be refused."
  }
}

run "two_replay_hosts" {
  variables {
    replay_hosts = 2
    actor_hosts  = 2
  }

  assert {
    condition     = [for host in module.replay : host.group_name] == ["apex-jax-replay", "apex-jax-replay-1"] && toset(keys(output.user_data)) == toset(["replay", "replay-1", "learner", "actor", "evaluator"])
    error_message = "Each replay server has a group of its own, under its name."
  }
  assert {
    condition = alltrue([
      for host in module.replay : host.group.hosts == 1 && host.group.max_size == 1 && host.group.maintenance.max_healthy_percentage == 100 &&
      host.group.subnet_ids == module.learner.group.subnet_ids && host.group.distribution.on_demand_percentage_above_base_capacity == 100
    ])
    error_message = "Each is a group of one at most, on demand, beside the learner."
  }
  assert {
    condition = (
      strcontains(output.user_data.actor, "addresses.experience=[tcp://replay.apex-jax.internal:5550,tcp://replay-1.apex-jax.internal:5550] ") &&
      strcontains(output.user_data.learner, "addresses.sampling=[tcp://replay.apex-jax.internal:5551,tcp://replay-1.apex-jax.internal:5551] ")
    )
    error_message = "Actors and learner know all replay servers, in one order."
  }
  assert {
    condition     = alltrue([for name, text in output.user_data : strcontains(text, "replay.servers=2 ")])
    error_message = "Every role knows their number."
  }
  assert {
    condition = (
      !strcontains(output.user_data.replay, "replay.index=") && strcontains(output.user_data["replay-1"], "replay.index=1 ") &&
      alltrue([for name in ["replay", "replay-1"] : strcontains(output.user_data[name], "addresses.experience=tcp://*:5550 ") && strcontains(output.user_data[name], "storage.url=s3://")])
    )
    error_message = "Each replay server has its place in that order, and serves on its own host."
  }
  assert {
    condition = (
      local.environment["replay-1"].APEX_JAX_ROLE == "replay" && local.environment["replay-1"].APEX_JAX_NAME == "replay-1" &&
      !contains(keys(local.environment.replay), "APEX_JAX_NAME") && local.environment["replay-1"].APEX_JAX_KEY_FILES == local.environment.replay.APEX_JAX_KEY_FILES
    )
    error_message = "A further replay server has the role's unit and keys, and reports under its own name."
  }
}

run "learner_uses_all_gpus_of_its_host" {
  variables {
    learner_devices = 0
  }

  assert {
    condition     = strcontains(output.user_data.learner, "learner.devices=0 ") && !strcontains(output.user_data.replay, "learner.devices")
    error_message = "Nought is all GPUs, not the preset's number."
  }
}

run "roles_are_told_where_the_others_are" {
  assert {
    condition     = strcontains(output.user_data.actor, "addresses.experience=tcp://replay.apex-jax.internal:5550 ") && strcontains(output.user_data.actor, "addresses.weights=tcp://learner.apex-jax.internal:5552 ")
    error_message = "An actor sends to the replay server and hears from the learner."
  }
  assert {
    condition     = alltrue([for word in ["replay.servers", "replay.index", "learner.devices", "APEX_JAX_NAME="] : !strcontains(jsonencode(output.user_data), word)])
    error_message = "One replay server and one GPU need no setting."
  }
  assert {
    condition     = strcontains(output.user_data.learner, "learner.device=gpu")
    error_message = "A learner without its GPU fails instead of going on with the CPU."
  }
  assert {
    condition     = strcontains(output.user_data.learner, "addresses.sampling=tcp://replay.apex-jax.internal:5551 ") && strcontains(output.user_data.learner, "addresses.weights=tcp://*:5552 ")
    error_message = "The learner draws from the replay server and serves weights."
  }
  assert {
    condition     = alltrue([for role, text in output.user_data : strcontains(text, "security.keys=/etc/apex-jax/keys") && !strcontains(text, "security.insecure")])
    error_message = "Every link has keys."
  }
  assert {
    condition     = alltrue([for role, text in output.user_data : strcontains(text, "addresses.status=tcp://127.0.0.1:5559 ")])
    error_message = "The status page is for the host itself."
  }
}

run "changing_the_number_of_actors_changes_no_host" {
  variables {
    actor_hosts = 9
  }

  assert {
    condition     = output.user_data == run.roles_are_told_where_the_others_are.user_data
    error_message = "The number of actors must be in nobody's user data: it would replace every host."
  }
}

run "stopped" {
  variables {
    running = false
  }

  assert {
    condition     = module.replay[0].group.hosts + module.learner.group.hosts + module.actor.group.hosts + module.evaluator[0].group.hosts == 0
    error_message = "No instance runs."
  }
  assert {
    condition     = length(aws_vpc_endpoint.interface) + length(aws_cloudwatch_metric_alarm.health) + length(aws_cloudwatch_metric_alarm.end) + length(aws_cloudwatch_metric_alarm.actors_missing) == 0
    error_message = "Nothing that costs by the hour is left, and no alarm cries."
  }
  assert {
    condition     = length(aws_s3_bucket.results) == 1
    error_message = "The bucket stays."
  }
}
