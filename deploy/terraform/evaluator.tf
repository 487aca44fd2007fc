# The evaluator plays full games with the newest weights. A spot instance is enough: an interrupted
# game is played again.

module "evaluator" {
  source = "./role"
  count  = var.evaluator ? 1 : 0

  settings        = local.group["evaluator"]
  subnet_ids      = local.subnet_ids
  hosts           = local.hosts_of["evaluator"]
  is_over         = local.is_over
  spot_percentage = 100
  only_one        = true

  depends_on = [terraform_data.host_needs]
}
