# The presets of `size`. The variable of the same name overrides an entry; volume_gib and instance_types override it
# for each role separately, settings for each key. A disk must be at least as large as that of its image (deploy/packer).

locals {
  presets = {
    small = { # one game in an afternoon: 128 of the paper's 360 environments, the paper's network and batch
      config_file             = "atari.yaml"
      settings                = { "total_minutes" = "240" } # an afternoon
      ladder_environments     = 128
      actor_hosts             = 2
      actor_host_environments = 64
      volume_gib              = { replay = 40, learner = 100, actor = 20, evaluator = 20 }
      instance_types = {
        replay    = ["r7i.large", "r6i.large", "r7a.large", "r6a.large"]
        learner   = ["g6.xlarge", "g5.xlarge"]
        actor     = ["c7i.xlarge", "c6i.xlarge", "c7a.xlarge", "c6a.xlarge", "m7i.xlarge", "m6i.xlarge"]
        evaluator = ["c7i.large", "c6i.large", "c7a.large", "c6a.large"]
      }
    }
    paper = { # Horgan et al. 2018: 360 environments, 2 M transitions of 7.8 kB on a device of 24 GB
      config_file             = "paper.yaml"
      settings                = { "total_minutes" = "7200" } # the paper's five days
      ladder_environments     = 360
      actor_hosts             = 6
      actor_host_environments = 60
      volume_gib              = { replay = 80, learner = 120, actor = 20, evaluator = 20 }
      instance_types = {
        replay    = ["r7i.xlarge", "r6i.xlarge", "r7a.xlarge", "r6a.xlarge"]
        learner   = ["g6.2xlarge", "g5.2xlarge"]
        actor     = ["c7i.2xlarge", "c6i.2xlarge", "c7a.2xlarge", "c6a.2xlarge", "m7i.2xlarge", "m6i.2xlarge"]
        evaluator = ["c7i.xlarge", "c6i.xlarge", "c7a.xlarge", "c6a.xlarge"]
      }
    }
  }
  preset = local.presets[var.size]

  config_file             = coalesce(var.config_file, local.preset.config_file)
  has_own_limit           = anytrue([for key in local.bounds : contains(keys(var.settings), key)]) # then the preset's does not count
  settings                = merge({ for key, value in local.preset.settings : key => value if key != "total_minutes" || !local.has_own_limit }, var.settings)
  ladder_environments     = coalesce(var.ladder_environments, local.preset.ladder_environments)
  actor_hosts             = var.actor_hosts == null ? local.preset.actor_hosts : var.actor_hosts
  actor_host_environments = coalesce(var.actor_host_environments, local.preset.actor_host_environments)
  volume_gib              = merge(local.preset.volume_gib, var.volume_gib)
  instance_types          = merge(local.preset.instance_types, var.instance_types)
}
