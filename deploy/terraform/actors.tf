# Actors: any number of hosts, mostly spot, of whatever type is cheap and plentiful. They keep nothing: one that goes
# costs the experience that it had not sent yet.

module "actor" {
  source = "./role"

  settings        = local.group["actor"]
  subnet_ids      = local.subnet_ids
  hosts           = var.running ? local.actor_hosts : 0
  spot_percentage = var.actor_spot_percentage

  depends_on = [terraform_data.host_needs]
}
