# What a fleet costs, roughly. Prices change: these are list prices of us-east-1 for Linux on demand, in US dollars,
# entered by hand for 2026-11. Other regions cost up to 1.5 times as much. Not counted: the bucket, metrics, logs and
# requests, some 0.02 an hour, and traffic between zones (README.md has an example).

locals {
  hourly_usd = {
    "r7i.large"   = 0.1323, "r6i.large" = 0.126, "r7a.large" = 0.1522, "r6a.large" = 0.1134
    "r7i.xlarge"  = 0.2646, "r6i.xlarge" = 0.252, "r7a.xlarge" = 0.3043, "r6a.xlarge" = 0.2268
    "g6.xlarge"   = 0.8048, "g5.xlarge" = 1.006, "g6.2xlarge" = 0.9776, "g5.2xlarge" = 1.212
    "c7i.large"   = 0.0893, "c6i.large" = 0.085, "c7a.large" = 0.1026, "c6a.large" = 0.0765
    "c7i.xlarge"  = 0.1785, "c6i.xlarge" = 0.17, "c7a.xlarge" = 0.2053, "c6a.xlarge" = 0.153
    "c7i.2xlarge" = 0.357, "c6i.2xlarge" = 0.34, "c7a.2xlarge" = 0.4106, "c6a.2xlarge" = 0.306
    "m7i.xlarge"  = 0.2016, "m6i.xlarge" = 0.192, "m7i.2xlarge" = 0.4032, "m6i.2xlarge" = 0.384
  }
  prices_known = alltrue([for role in local.roles : contains(keys(local.hourly_usd), local.instance_types[role][0])])
  month_hours  = 730
  spot_share   = 0.4 # of the on-demand price; an assumption, because spot prices change

  hosts              = { replay = 1, learner = 1, actor = local.actor_hosts, evaluator = var.evaluator ? 1 : 0 }
  spot_percentage_of = { replay = 0, learner = 0, actor = var.actor_spot_percentage, evaluator = 100 }
  instances_usd = sum([
    for role in local.roles : local.hosts[role] * lookup(local.hourly_usd, local.instance_types[role][0], 0) *
    (1 - (1 - local.spot_share) * local.spot_percentage_of[role] / 100)
  ])

  endpoints_usd = 0.01 * length(local.api_actions) * length(local.zone_names)
  disks_month   = 0.08 * sum([for role in local.roles : local.hosts[role] * local.volume_gib[role]])
  stopped_month = 1 + 0.5 + 80 * 0.05 # a stopped fleet pays them, too: KMS key, private zone, 80 GB of the images' snapshots
  running_month = local.stopped_month + local.disks_month + local.month_hours * (local.instances_usd + local.endpoints_usd)

  estimated_usd = {
    hour          = format("%.2f", local.running_month / local.month_hours)
    month         = format("%.0f", local.running_month)
    month_stopped = format("%.0f", local.stopped_month)
  }
}
