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

variable "cpu_instance_type" {
  type        = string
  description = "Instance that makes the CPU image."
  default     = "c7i.large"

  validation { # as for Terraform's `instance_types`
    condition     = regex_replace(var.cpu_instance_type, "^(a1\\.|mac2|[a-z]+[0-9]+[a-z-]*g).*$", "") != ""
    error_message = "The images are for x86: the CPU image's instance is no ARM (c7g, m7gd, t4g, a1), but such as c7i.large."
  }
}

variable "gpu_instance_type" {
  type        = string
  description = "Instance that makes the GPU image and tries it: one that learners run on."
  default     = "g6.xlarge"

  validation {
    condition     = var.gpu_instance_type != "" && regex_replace(var.gpu_instance_type, "^(gr?|p)([4-9]|[1-9][0-9])[a-z0-9-]*\\.[a-z0-9-]+$", "") == ""
    error_message = "The GPU image's instance has an NVIDIA GPU that CUDA 13 knows: g4dn, g5, g6, gr6, p4d, p5 or newer, such as g6.xlarge."
  }
  validation {
    condition     = regex_replace(var.gpu_instance_type, "^(g4ad|[a-z]+[0-9]+[a-z-]*g).*$", "") != ""
    error_message = "The images are for x86 and NVIDIA: the GPU image's instance is no ARM (g5g) and none with a GPU of AMD (g4ad)."
  }
}

variable "kms_key_id" {
  type        = string
  description = "Key that encrypts the images; empty = the account's own for EBS."
  default     = ""
}

variable "subnet_id" {
  type        = string
  description = "Subnet with a route to the internet, to install packages; empty = one of the default VPC, if the account has one."
  default     = ""
}
