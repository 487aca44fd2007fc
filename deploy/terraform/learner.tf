# The learner: one GPU, or several (learner_devices). A group of one host, on demand: a replacement resumes from the
# newest checkpoint in the bucket and takes over the private name.

module "learner" {
  source = "./role"

  settings        = local.group["learner"]
  subnet_ids      = slice(local.subnet_ids, 0, min(1, length(local.subnet_ids))) # the replay server's subnet
  hosts           = local.hosts_of["learner"]
  is_over         = local.is_over
  spot_percentage = 0
  only_one        = true

  depends_on = [terraform_data.host_needs]
}
