# What one variable demands of another. (A variable's own validation may name others only from Terraform 1.9 on.)

resource "terraform_data" "rules" {
  lifecycle {
    precondition {
      condition     = local.own_vpc == (length(var.subnet_ids) == 0)
      error_message = "vpc_id and subnet_ids go together: give both for an existing VPC, none for an own one."
    }
    precondition {
      condition     = var.create_endpoints == (var.endpoints_security_group_id == "")
      error_message = "endpoints_security_group_id is for create_endpoints = false, and needed there."
    }
    precondition {
      condition     = var.create_endpoints || !local.own_vpc
      error_message = "create_endpoints = false needs an existing VPC (vpc_id): a VPC of its own has no other way to AWS."
    }
    precondition {
      condition     = var.bucket != "" || var.bucket_kms_key_arn == ""
      error_message = "bucket_kms_key_arn is for an existing bucket (bucket); the fleet's own has the fleet's key."
    }
    precondition {
      condition     = var.monthly_budget_usd == 0 || var.alarm_email != ""
      error_message = "monthly_budget_usd needs alarm_email: a budget that writes to nobody warns nobody."
    }
  }
}
