variable "settings" {
  description = "The inputs that every role has (local.group in roles.tf of the fleet)."
  type = object({
    name                  = string
    role                  = string
    user_data             = string
    image_id              = string
    instance_types        = list(string)
    volume_gib            = number
    instance_profile_name = string
    security_group_id     = string
    tags                  = map(string)
    run                   = string
  })

  validation {
    condition     = length(var.settings.user_data) <= 16384
    error_message = "settings.user_data: EC2 takes at most 16384 bytes."
  }
}

variable "subnet_ids" {
  description = "Subnets that the hosts may start in."
  type        = list(string)
}

variable "hosts" {
  description = "Number of hosts."
  type        = number
}

variable "is_over" {
  description = "Whether the run is over: then the group has no host, and the same maximum."
  type        = bool
}

variable "spot_percentage" {
  description = "Share of the hosts that are spot instances, in percent."
  type        = number
}

variable "only_one" {
  description = "Whether a second host must never be in service beside the first: the two would share one name."
  type        = bool
  default     = false
}
