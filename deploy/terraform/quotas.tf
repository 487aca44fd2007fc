# Quotas of the account, in vCPUs. A new account has none for GPUs; an apply then succeeds, and nothing learns. These only
# warn, and only while the fleet runs: a quota that cannot be read must end neither stop nor destroy.
# (The error of a check's own data source is a warning, too: https://developer.hashicorp.com/terraform/language/block/check.
# Not tried on AWS.) Codes: aws service-quotas list-service-quotas --service-code ec2

locals {
  vcpus = { # of a host of each role, of the first type: large 2, xlarge 4, 2xlarge 8; 0 if unknown
    for role in local.roles : role => try(
      4 * coalesce(regex("\\.([0-9]*)xlarge$", local.instance_types[role][0])[0], "1"),
      { large = 2, medium = 1 }[split(".", local.instance_types[role][0])[1]], 0
    )
  }
  on_demand_actors = local.actor_hosts - floor(local.actor_hosts * var.actor_spot_percentage / 100)
  vcpus_needed = {
    gpu      = local.vcpus.learner
    standard = local.vcpus.replay + local.on_demand_actors * local.vcpus.actor
    spot     = (local.actor_hosts - local.on_demand_actors) * local.vcpus.actor + local.hosts.evaluator * local.vcpus.evaluator
  }
  quota_message = "vCPUs, fewer than the fleet needs: request more (Service Quotas, a day ahead), or hosts will not start while the others cost."
}

check "quota_gpu" {
  data "aws_servicequotas_service_quota" "gpu" {
    service_code = "ec2"
    quota_code   = startswith(local.instance_types.learner[0], "p") ? "L-417A185B" : "L-DB2E81BA"
  }
  assert {
    condition     = !var.running || data.aws_servicequotas_service_quota.gpu.value >= local.vcpus_needed.gpu
    error_message = "The learner needs ${local.vcpus_needed.gpu}, and the quota ${data.aws_servicequotas_service_quota.gpu.quota_name} is ${data.aws_servicequotas_service_quota.gpu.value} ${local.quota_message}"
  }
}

check "quota_standard" {
  data "aws_servicequotas_service_quota" "standard" {
    service_code = "ec2"
    quota_code   = "L-1216C47A"
  }
  assert {
    condition     = !var.running || data.aws_servicequotas_service_quota.standard.value >= local.vcpus_needed.standard
    error_message = "Replay server and actors on demand need ${local.vcpus_needed.standard}, and the quota ${data.aws_servicequotas_service_quota.standard.quota_name} is ${data.aws_servicequotas_service_quota.standard.value} ${local.quota_message}"
  }
}

check "quota_spot" {
  data "aws_servicequotas_service_quota" "spot" {
    service_code = "ec2"
    quota_code   = "L-34B43A08"
  }
  assert {
    condition     = !var.running || data.aws_servicequotas_service_quota.spot.value >= local.vcpus_needed.spot
    error_message = "Actors and evaluator on spot need ${local.vcpus_needed.spot}, and the quota ${data.aws_servicequotas_service_quota.spot.quota_name} is ${data.aws_servicequotas_service_quota.spot.value} ${local.quota_message}"
  }
}
