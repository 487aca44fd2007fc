terraform {
  required_version = ">= 1.7"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100" # provider 6 calls a bucket's region bucket_region (rules.tf); not tried
    }
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = merge({ Project = "apex-jax", Fleet = var.name }, var.tags)
  }
}
