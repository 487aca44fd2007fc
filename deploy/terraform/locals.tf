# Values that several files use.

data "aws_caller_identity" "current" {}

locals {
  account_id = data.aws_caller_identity.current.account_id

  roles = toset(["replay", "learner", "actor", "evaluator"])
  ports = { experience = 5550, sampling = 5551, weights = 5552, status = 5559 }

  domain = "${var.name}.internal" # contains the private names of replay server and learner
  host   = { for role in ["replay", "learner"] : role => "${role}.${local.domain}" }

  zone_arn = "arn:aws:route53:::hostedzone/${aws_service_discovery_private_dns_namespace.fleet.hosted_zone}"

  bucket_name    = var.bucket != "" ? var.bucket : aws_s3_bucket.results[0].bucket
  bucket_arn     = "arn:aws:s3:::${local.bucket_name}"
  bucket_key_arn = var.bucket != "" ? var.bucket_kms_key_arn : aws_kms_key.fleet.arn
  run_prefix     = "runs/${var.run}"
  run_url        = "s3://${local.bucket_name}/${local.run_prefix}"

  # The roles with a copy of the run's state (storage.url), in folders of their names; evaluator and actors have none.
  state_keepers = ["replay", "learner"]
  # The results that each role writes, with the names of deploy/host/results.py.
  result_files = {
    for role, more in { replay = [], learner = ["config.yaml", "starts.jsonl"], evaluator = ["video.*"] } : role => concat(
      ["metrics/${role}.jsonl", "tensorboard/${role}/*"], more
    )
  }

  key_path = "/apex-jax/${var.name}/keys" # deploy/push_keys.py writes there
  # The keys that each role fetches: its own secret key, and the public keys of its servers and its allowed clients.
  key_files = {
    replay    = ["replay.secret", "replay.public", "actor.public", "learner.public"]
    learner   = ["learner.secret", "learner.public", "replay.public", "actor.public", "evaluator.public"]
    actor     = ["actor.secret", "actor.public", "replay.public", "learner.public"]
    evaluator = ["evaluator.secret", "evaluator.public", "learner.public"]
  }
}

# The images of exactly this commit; if it was built several times, the newest. A new version needs a new commit.
data "aws_ami_ids" "own" {
  for_each = toset(["cpu", "gpu"])

  owners = ["self"]

  filter {
    name   = "name"
    values = ["apex-jax-${each.key}-*"]
  }
  filter {
    name   = "state"
    values = ["available"]
  }
  filter {
    name   = "tag:Commit"
    values = [var.commit]
  }
}

# A fleet whose images are gone can be stopped and destroyed: its launch templates stay as they are.
data "aws_launch_template" "before" {
  for_each = var.running || local.has_images ? [] : local.roles

  name = "${var.name}-${each.key}"
}

locals {
  has_images = alltrue([for found in data.aws_ami_ids.own : length(found.ids) > 0])
  image_ids = {
    for role in local.roles : role => local.has_images ? data.aws_ami_ids.own[role == "learner" ? "gpu" : "cpu"].ids[0] : (
      var.running ? "" : data.aws_launch_template.before[role].image_id
    )
  }
}
