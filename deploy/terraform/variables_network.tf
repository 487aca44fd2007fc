# The network of a fleet: its own VPC, or an existing one. See variables.tf.

variable "zone_names" {
  type        = list(string)
  description = "Zones of the fleet's own VPC; the first holds replay and learner, actors and evaluator are spread over all. Empty = the region's first zone. More zones: more spot capacity, and traffic to pay for."
  default     = []
  nullable    = false
}

variable "vpc_id" {
  type        = string
  description = "Existing VPC, with DNS support and host names on, and with the endpoints of endpoints.tf; empty = the fleet makes its own."
  default     = ""
  nullable    = false
}

variable "subnet_ids" {
  type        = list(string)
  description = "Private subnets of the existing VPC, each in another zone; the first holds replay and learner, actors and evaluator are spread over all."
  default     = []
  nullable    = false
}

variable "endpoints_security_group_id" {
  type        = string
  description = "Security group of the existing VPC's interface endpoints, to which the fleet adds a rule for each role."
  default     = ""
  nullable    = false
}
