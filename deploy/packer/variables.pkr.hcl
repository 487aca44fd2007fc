variable "commit" {
  type        = string
  description = "Commit of the project that goes into the images: git rev-parse HEAD."

  validation {
    condition     = var.commit != "" && regex_replace(var.commit, "^[0-9a-f]{40}$", "") == ""
    error_message = "The commit is the 40 hexadecimal digits that git rev-parse HEAD prints."
  }
}

variable "region" {
  type        = string
  description = "AWS region that the images are made for."
  default     = "us-east-1"

  validation { # as for Terraform's `region`: in these clouds the owners of the base images have other account numbers
    condition     = regex_replace(var.region, "^(cn|us-gov|us-iso[a-z]*|eusc)-.*$", "") != ""
    error_message = "The region is none of China, GovCloud and other clouds of their own."
  }
}

variable "gpu_instance_type" {
  type        = string
  description = "Instance that makes the GPU image and tries it: one that learners run on."
  default     = "g6.xlarge"
}

variable "subnet_id" {
  type        = string
  description = "Subnet with a route to the internet, to install packages; empty = one of the default VPC, if the account has one."
  default     = ""
}
