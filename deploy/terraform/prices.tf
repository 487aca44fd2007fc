# The approximate price of an hour. Prices change: these are list prices of us-east-1 for Linux on demand, in US
# dollars, entered by hand for 2026-11 (deploy/README.md says how to check them). Other regions cost up to 1.5 times as
# much.

locals {
  hourly_usd = {
    "r7i.large"   = 0.1323, "r6i.large" = 0.126, "r7a.large" = 0.1522, "r6a.large" = 0.1134
    "r7i.xlarge"  = 0.2646, "r6i.xlarge" = 0.252, "r7a.xlarge" = 0.3043, "r6a.xlarge" = 0.2268
    "g6.xlarge"   = 0.8048, "g5.xlarge" = 1.006, "g6.2xlarge" = 0.9776, "g5.2xlarge" = 1.212
    "g6.12xlarge" = 4.6016, "g5.12xlarge" = 5.672, "g6.48xlarge" = 13.3504, "g5.48xlarge" = 16.288 # 4 and 8 GPUs
    "c7i.large"   = 0.0893, "c6i.large" = 0.085, "c7a.large" = 0.1026, "c6a.large" = 0.0765
    "c7i.xlarge"  = 0.1785, "c6i.xlarge" = 0.17, "c7a.xlarge" = 0.2053, "c6a.xlarge" = 0.153
    "c7i.2xlarge" = 0.357, "c6i.2xlarge" = 0.34, "c7a.2xlarge" = 0.4106, "c6a.2xlarge" = 0.306
    "m7i.xlarge"  = 0.2016, "m6i.xlarge" = 0.192, "m7i.2xlarge" = 0.4032, "m6i.2xlarge" = 0.384
  }
  price_region       = "us-east-1"
  spot_share         = 0.4  # of the on-demand price; an assumption, because spot prices change
  endpoint_usd       = 0.01 # per interface endpoint and zone
  gibibyte_hour_usd  = 0.08 / 730
  watching_usd       = 7 * 0.3 / 730 + 60 * 0.01 / 1000             # per host: EC2's detailed metrics, and a report each minute
  role_metrics_usd   = 3 * 0.3 / 730                                # per role, and per replay server: the metrics in the reports
  monthly_fixed_usd  = 1 + (5 + 3 * local.replay_hosts) * 0.1 + 0.5 # KMS key, alarms, private zone
  hosts              = { replay = local.replay_hosts, learner = 1, actor = local.actor_hosts, evaluator = var.evaluator ? 1 : 0 }
  spot_percentage_of = { replay = 0, learner = 0, actor = var.actor_spot_percentage, evaluator = 100 }

  role_usd = {
    for role in local.roles : role => local.hosts[role] * (
      lookup(local.hourly_usd, local.instance_types[role][0], 0) * (1 - (1 - local.spot_share) * local.spot_percentage_of[role] / 100)
      + local.volume_gib[role] * local.gibibyte_hour_usd + local.watching_usd
    ) + (role == "replay" ? local.replay_hosts : min(1, local.hosts[role])) * local.role_metrics_usd
  }
  endpoints_usd = length(local.interface_endpoints) * length(local.subnet_ids) * local.endpoint_usd
  prices_known  = alltrue([for role in local.roles : contains(keys(local.hourly_usd), local.instance_types[role][0])])

  estimated_hourly_usd = !var.running ? local.monthly_fixed_usd / 730 : (
    sum(values(local.role_usd)) + local.endpoints_usd + local.monthly_fixed_usd / 730
  )
}
