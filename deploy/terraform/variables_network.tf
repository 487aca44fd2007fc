# The network of a fleet: its own VPC, or an existing one. See variables.tf.

variable "vpc_id" {
  type        = string
  description = "Existing VPC, with DNS support and host names on; empty = the fleet makes its own."
  default     = ""
  nullable    = false
}

variable "subnet_ids" {
  type        = list(string)
  description = "Private subnets of the existing VPC, each in another zone; the first also holds replay and learner."
  default     = []
  nullable    = false
}

variable "create_endpoints" {
  type        = bool
  description = "Whether to make VPC endpoints; false only if an existing VPC has all of them (endpoints.tf)."
  default     = true
  nullable    = false
}

variable "existing_endpoints" {
  type        = set(string)
  description = "Services whose endpoints an existing VPC has already, such as [\"s3\", \"ssm\"]: the fleet makes only the others."
  default     = []
  nullable    = false

  validation {
    condition     = length(setsubtract(var.existing_endpoints, ["logs", "monitoring", "s3", "servicediscovery", "ssm", "ssmmessages"])) == 0
    error_message = "existing_endpoints: of logs, monitoring, s3, servicediscovery, ssm and ssmmessages."
  }
}

variable "route_table_ids" {
  type        = list(string)
  description = "Route tables of the existing VPC's subnets; needed if the fleet makes the endpoint of S3, which adds a route to them."
  default     = []
  nullable    = false
}

variable "endpoints_security_group_id" {
  type        = string
  description = "Security group of the endpoints that an existing VPC has (create_endpoints = false, existing_endpoints)."
  default     = ""
  nullable    = false
}

variable "vpc_cidr" {
  type        = string
  description = "Addresses of the fleet's own VPC; each zone has an eighth of them."
  default     = "10.83.0.0/16"

  validation {
    condition     = can(cidrhost(var.vpc_cidr, 0)) && try(tonumber(split("/", var.vpc_cidr)[1]) >= 16 && tonumber(split("/", var.vpc_cidr)[1]) <= 24, false)
    error_message = "vpc_cidr: an IPv4 block from /16 to /24, such as 10.83.0.0/16."
  }
}

variable "zones" {
  type        = number
  description = "Availability zones of the fleet's own VPC: more zones, more spot capacity, more endpoints to pay for."
  default     = 2

  validation {
    condition     = contains([1, 2, 3], var.zones)
    error_message = "zones: 1, 2 or 3."
  }
}

variable "zone_names" {
  type        = list(string)
  description = "Zones of the fleet's own VPC by name; the first also holds replay and learner. Empty = the region's first `zones`."
  default     = []
  nullable    = false

  validation {
    condition = (
      length(var.zone_names) <= 3 && length(distinct(var.zone_names)) == length(var.zone_names) &&
      alltrue([for zone in var.zone_names : can(regex("^[a-z]{2}(-[a-z]+)+-[0-9][a-h]$", zone))])
    )
    error_message = "zone_names: at most 3 zones, each once, such as [\"us-east-1b\", \"us-east-1a\"]."
  }
}
