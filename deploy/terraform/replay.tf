# The replay servers: memory, and one busy core each. Each is a group of one host, on demand: a replacement loads that
# server's copy from the bucket and takes over its private name; learner and actors reconnect automatically.

module "replay" {
  source = "./role"
  count  = local.replay_hosts

  settings        = local.group[local.replay_names[count.index]]
  subnet_ids      = slice(local.subnet_ids, 0, min(1, length(local.subnet_ids))) # the learner's subnet
  hosts           = local.hosts_of["replay"]
  is_over         = local.is_over
  spot_percentage = 0
  only_one        = true

  depends_on = [terraform_data.host_needs]
}
