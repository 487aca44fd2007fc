# The variables of a fleet. `null` means the value of the preset that `size` names (presets.tf).

variable "name" {
  type        = string
  description = "Name of the fleet: prefix of everything it makes, and the folder of its keys (deploy.push_keys NAME)."
  default     = "apex-jax"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,19}$", var.name)) && !endswith(var.name, "-")
    error_message = "name: 2 to 20 of a-z, 0-9 and '-', beginning with a letter and not ending with '-'."
  }
}

variable "region" {
  type        = string
  description = "AWS region of the fleet."
  default     = "us-east-1"

  validation {
    condition     = !can(regex("^(cn|us-gov|us-iso[a-z]*|eusc)-", var.region))
    error_message = "region: none of China, GovCloud and other clouds of their own."
  }
}

variable "size" {
  type        = string
  description = "Preset of machines and settings: small (an afternoon on one game) or paper (360 environments)."
  default     = "small"

  validation {
    condition     = contains(["small", "paper"], var.size)
    error_message = "size: small or paper."
  }
}

variable "running" {
  type        = bool
  description = "false stops everything that costs by the hour (instances, endpoints) and keeps bucket, names and network."
  default     = true
  nullable    = false
}

variable "commit" {
  type        = string
  description = "Commit of the project that the fleet runs: images with this tag, made by deploy/packer."

  validation {
    condition     = can(regex("^[0-9a-f]{40}$", var.commit))
    error_message = "commit: the 40 hexadecimal digits that `git rev-parse HEAD` prints."
  }
}

# --- the run ---

variable "run" {
  type        = string
  description = "Name of the run: its folder in the bucket. The same name resumes the run, a new one begins another."
  default     = "run-1"

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", var.run))
    error_message = "run: 1 to 64 of letters, digits, '.', '_' and '-', beginning with a letter or digit."
  }
}

variable "task" {
  type        = string
  description = "EnvPool task that the fleet learns."
  default     = "Pong-v5"

  validation {
    condition     = can(regex("^[A-Za-z0-9]+-v[0-9]+$", var.task))
    error_message = "task: an EnvPool task, such as Breakout-v5."
  }
}

variable "config_file" {
  type        = string
  description = "Configuration in the project's configs/ folder; null = the preset's."
  default     = null

  validation {
    condition     = var.config_file == null || can(regex("^[a-z0-9_]+\\.yaml$", var.config_file))
    error_message = "config_file: a file of configs/, such as atari.yaml, without a folder."
  }
}

variable "settings" {
  type        = map(string)
  description = "Further keys of the run for every role, such as { \"seed\" = \"3\", \"total_minutes\" = \"600\" }; those of the preset stay, unless given here."
  default     = {}
  nullable    = false

  validation {
    condition = alltrue([
      for key, value in var.settings : can(regex("^[a-z_]+(\\.[a-z_]+)?$", key)) && can(regex("^[^\\s\"'\\\\$%`]+$", value))
    ])
    error_message = "settings: keys are those of `python main.py --help`, such as replay.priority_exponent; a value is not empty and has no blank, quote, backslash, '$', '%' or '`'."
  }
  validation {
    condition = !anytrue([
      for key in keys(var.settings) : can(regex(
        "^(run_directory|environment\\.task|storage\\.url|actor\\.(environments|ladder_size)|(actor|learner|evaluator)\\.device|(addresses|security)\\..*)$", key
      ))
    ])
    error_message = "settings: run_directory, environment.task, storage.url, actor.environments, actor.ladder_size (ladder_environments), *.device, addresses.* and security.* are set by the fleet."
  }
}

variable "ladder_environments" {
  type        = number
  description = "Length of the epsilon ladder: environments planned for the fleet; stays when actor_hosts changes."
  default     = null
}

# --- machines ---

variable "actor_hosts" {
  type        = number
  description = "Number of actor hosts. The one variable to change while the fleet runs."
  default     = null
}

variable "actor_host_environments" {
  type        = number
  description = "Environments of one actor host."
  default     = null
}

variable "actor_spot_percentage" {
  type        = number
  description = "Share of the actor hosts that are spot instances, in percent; the others are on demand."
  default     = 100
}

variable "evaluator" {
  type        = bool
  description = "Whether an instance plays full games with the newest weights, which gives the curve of results."
  default     = true
  nullable    = false
}

variable "instance_types" {
  type        = map(list(string))
  description = "Instance types by role (replay, learner, actor, evaluator), of x86, best first; roles left out have the preset's."
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for role in keys(var.instance_types) : contains(["replay", "learner", "actor", "evaluator"], role)])
    error_message = "instance_types: the roles are replay, learner, actor and evaluator."
  }
  validation { # CUDA 13 does not support earlier generations; g4ad has AMD GPUs, g5g ARM processors
    condition = alltrue([
      for type in lookup(var.instance_types, "learner", []) : can(regex("^(gr?|p)([4-9]|[1-9][0-9])", type)) && !can(regex("^(g4ad|g5g)\\.", type))
    ])
    error_message = "instance_types: the learner needs an NVIDIA GPU that CUDA 13 knows: g4dn, g5, g6, gr6, p4d, p5 or newer."
  }
}

variable "volume_gib" {
  type        = map(number)
  description = "Size of a host's disk by role (replay, learner, actor, evaluator), in GiB; roles left out have the preset's."
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for role in keys(var.volume_gib) : contains(["replay", "learner", "actor", "evaluator"], role)])
    error_message = "volume_gib: the roles are replay, learner, actor and evaluator."
  }
}

variable "zone_names" {
  type        = list(string)
  description = "Zones; the first holds replay and learner, actors and evaluator are spread over all. Empty = the first that has all endpoints, which can change in months: name it for a long run. More zones: more spot capacity, and traffic to pay for."
  default     = []
  nullable    = false
}

# --- storage, keys, watching ---

variable "bucket" {
  type        = string
  description = "Existing bucket of the fleet's region for checkpoints and results, which outlives the fleet; empty = the fleet makes its own."
  default     = ""
  nullable    = false
}

variable "bucket_kms_key_arn" {
  type        = string
  description = "Key that encrypts the existing bucket; empty = it is encrypted with S3's own."
  default     = ""
  nullable    = false
}

variable "delete_results" {
  type        = bool
  description = "Whether destroy may delete the fleet's own bucket with results in it; must be applied before the destroy."
  default     = false
  nullable    = false
}

variable "alarm_email" {
  type        = string
  description = "Address that alarms write to; it must confirm once. Empty = alarms show in the console only."
  default     = ""
  nullable    = false
}

variable "tags" {
  type        = map(string)
  description = "Further tags of everything the fleet makes."
  default     = {}
  nullable    = false

  validation {
    condition     = length(setintersection([for key in keys(var.tags) : lower(key)], ["project", "fleet", "role", "name"])) == 0
    error_message = "tags: Project, Fleet, Role and Name, in whatever case, are the fleet's own: commands find hosts and images by them."
  }
}
