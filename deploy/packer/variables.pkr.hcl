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

  validation {
    condition     = regex_replace(var.region, "^[a-z]{2}(-[a-z]+)+-[0-9]$", "") == ""
    error_message = "The region is a region's code, such as us-east-1."
  }
}

variable "cpu_instance_type" {
  type        = string
  description = "Instance that makes the CPU image."
  default     = "c7i.large"
}

variable "gpu_instance_type" {
  type        = string
  description = "Instance that makes the GPU image and tries it: one that learners run on."
  default     = "g6.xlarge"
}

variable "kms_key_id" {
  type        = string
  description = "Key that encrypts the images; empty = the account's own for EBS."
  default     = ""
}

variable "subnet_id" {
  type        = string
  description = "Subnet with a way to the internet, to install packages; empty = the default VPC's, where the account has one."
  default     = ""
}
