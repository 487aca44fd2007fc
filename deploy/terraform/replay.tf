# The replay server: memory, and one busy core. A group of one host, on demand: a replacement loads the replay's copy
# from the bucket and takes over the private name; learner and actors reconnect automatically.

module "replay" {
  source = "./role"

  settings        = local.group["replay"]
  subnet_ids      = slice(local.subnet_ids, 0, min(1, length(local.subnet_ids))) # the learner's subnet
  hosts           = var.running ? 1 : 0
  spot_percentage = 0
  only_one        = true

  depends_on = [terraform_data.host_needs]
}
