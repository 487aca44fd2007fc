# The settings of the run for the hosts of all roles, in the environment file that cloud-init writes. Hosts of a role have
# the same ones.

locals {
  # IAM limits a host to a namespace, and knows no dimensions: with one for all, any host could end every fleet.
  # Not tried on AWS: https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/iam-cw-condition-keys-namespace.html
  metric_namespaces = { for role in local.roles : role => "ApexJax/${var.name}/${role}" }

  # Settings that must be equal for every role of the fleet.
  common_settings = merge(
    {
      "environment.task"         = var.task
      "actor.environments"       = tostring(local.actor_host_environments) # every role checks the ladder against it
      "actor.ladder_size"        = tostring(local.ladder_environments)
      "run_directory"            = "/var/lib/apex-jax/${var.run}"
      "security.keys"            = "/etc/apex-jax/keys"
      "addresses.status"         = "tcp://127.0.0.1:${local.ports.status}"
      "metrics_interval_seconds" = "15"
    },
    local.settings,
  )

  storage_settings = { "storage.url" = local.run_url }

  role_settings = {
    replay = merge(
      local.storage_settings,
      {
        "addresses.experience" = "tcp://*:${local.ports.experience}"
        "addresses.sampling"   = "tcp://*:${local.ports.sampling}"
      },
    )
    learner = merge(
      local.storage_settings,
      {
        "addresses.sampling" = "tcp://${local.host.replay}:${local.ports.sampling}"
        "addresses.weights"  = "tcp://*:${local.ports.weights}"
        "learner.device"     = "gpu" # without GPU or driver the role fails and raises an alarm; "auto" would use the CPU
      },
    )
    actor = {
      "addresses.experience" = "tcp://${local.host.replay}:${local.ports.experience}"
      "addresses.weights"    = "tcp://${local.host.learner}:${local.ports.weights}"
      "actor.device"         = "cpu"
    }
    evaluator = {
      "addresses.weights" = "tcp://${local.host.learner}:${local.ports.weights}"
    }
  }

  # KEY=value lines for systemd; deploy/host and deploy/systemd read them.
  environment = {
    for role in local.roles : role => {
      APEX_JAX_ROLE                  = role
      APEX_JAX_CONFIG                = "configs/${local.config_file}"
      APEX_JAX_SETTINGS              = join(" ", [for key, value in merge(local.common_settings, local.role_settings[role]) : "${key}=${value}"])
      APEX_JAX_RUN                   = "/var/lib/apex-jax/${var.run}"
      APEX_JAX_RUN_AND_END           = local.run_and_end
      APEX_JAX_STORAGE               = role == "actor" ? "" : local.run_url
      APEX_JAX_KEY_PATH              = local.key_path
      APEX_JAX_KEY_FILES             = join(" ", local.key_files[role])
      APEX_JAX_SERVICE_ID            = contains(keys(local.host), role) ? aws_service_discovery_service.host[role].id : ""
      APEX_JAX_NAMESPACE             = local.metric_namespaces[role]
      APEX_JAX_STATUS                = "tcp://127.0.0.1:${local.ports.status}"
      AWS_DEFAULT_REGION             = var.region
      AWS_REGION                     = var.region
      XDG_CACHE_HOME                 = "/var/lib/apex-jax/cache"
      PYTHONUNBUFFERED               = "1"
      XLA_PYTHON_CLIENT_MEM_FRACTION = "0.9" # the frame store takes most of the learner's device memory
    }
  }

  units = {
    replay    = ["apex-jax@replay.service", "apex-jax-health.timer", "apex-jax-results.timer"]
    learner   = ["apex-jax@learner.service", "apex-jax-health.timer", "apex-jax-results.timer"]
    actor     = ["apex-jax@actor.service", "apex-jax-health.timer"]
    evaluator = ["apex-jax@evaluator.service", "apex-jax-health.timer", "apex-jax-results.timer"]
  }

  user_data = {
    for role in local.roles : role => templatefile("${path.module}/templates/cloud_init.yaml.tftpl", {
      role        = role
      fleet       = var.name
      environment = join("\n", [for key, value in local.environment[role] : "${key}=\"${value}\""])
      units       = local.units[role]
      log_agent = jsonencode({
        logs = {
          logs_collected = {
            files = {
              # The log of the role, and that of all other units (deploy/systemd). They are named one by one: of the
              # files that match a wildcard, the agent follows only the one written last.
              collect_list = [for file, stream in { (role) = "{instance_id}", host = "{instance_id}-host" } : {
                file_path       = "/var/log/apex-jax/${file}.log"
                log_group_name  = aws_cloudwatch_log_group.role[role].name
                log_stream_name = stream
              }]
            }
          }
        }
      })
    })
  }
}

resource "aws_cloudwatch_log_group" "role" {
  for_each = local.roles

  name              = "/apex-jax/${var.name}/${each.key}"
  retention_in_days = 30
  kms_key_id        = aws_kms_key.fleet.arn
}
