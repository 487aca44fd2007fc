# Actors: any number of hosts, mostly spot instances, of any type that is cheap and available. They store nothing: a
# terminated actor loses only the experience that it has not sent yet.

module "actor" {
  source = "./role"

  settings        = local.group["actor"]
  subnet_ids      = local.subnet_ids
  hosts           = local.hosts_of["actor"]
  is_over         = local.is_over
  spot_percentage = var.actor_spot_percentage

  depends_on = [terraform_data.host_needs]
}
