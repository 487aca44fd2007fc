# Names that several files share.

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

locals {
  account_id = data.aws_caller_identity.current.account_id
  partition  = data.aws_partition.current.partition

  roles = toset(["replay", "learner", "actor", "evaluator"])
  ports = { experience = 5550, sampling = 5551, weights = 5552, status = 5559, tensorboard = 6006 }

  domain = "${var.name}.internal" # of the private names that replay and learner are found by
  host   = { for role in ["replay", "learner"] : role => "${role}.${local.domain}" }

  zone_arn = "arn:${local.partition}:route53:::hostedzone/${aws_service_discovery_private_dns_namespace.fleet.hosted_zone}"

  bucket_name    = var.bucket != "" ? var.bucket : aws_s3_bucket.results[0].bucket
  bucket_arn     = "arn:${local.partition}:s3:::${local.bucket_name}"
  bucket_key_arn = var.bucket != "" ? var.bucket_kms_key_arn : aws_kms_key.fleet.arn
  run_prefix     = "runs/${var.run}"
  run_url        = "s3://${local.bucket_name}/${local.run_prefix}"

  # Whose copy of the run's state (storage.url) lies in the folder of its name. The evaluator has none, nor have actors.
  state_keepers = ["replay", "learner"]
  # The results for people that each role writes, as deploy/host/results.py names them.
  result_files = {
    for role, more in { replay = [], learner = ["config.yaml", "starts.jsonl"], evaluator = ["video.*"] } : role => concat(
      ["metrics/${role}.jsonl", "tensorboard/${role}/*"], more
    )
  }

  key_path = "/apex-jax/${var.name}/keys" # deploy/push_keys.py writes there
  # The keys each role may read: its own secret one, and the public ones of its servers and of the clients it lets in.
  key_files = {
    replay    = ["replay.secret", "replay.public", "actor.public", "learner.public"]
    learner   = ["learner.secret", "learner.public", "replay.public", "actor.public", "evaluator.public"]
    actor     = ["actor.secret", "actor.public", "replay.public", "learner.public"]
    evaluator = ["evaluator.secret", "evaluator.public", "learner.public"]
  }

  image_ids = {
    cpu = var.cpu_image_id != "" ? var.cpu_image_id : data.aws_ami.own["cpu"].id
    gpu = var.gpu_image_id != "" ? var.gpu_image_id : data.aws_ami.own["gpu"].id
  }
}

# Images of exactly this commit: a new version is a new commit. Of several builds of one commit, the newest.
data "aws_ami" "own" {
  for_each = toset([for kind, id in { cpu = var.cpu_image_id, gpu = var.gpu_image_id } : kind if id == ""])

  owners      = ["self"]
  most_recent = true

  filter {
    name   = "name"
    values = ["apex-jax-${each.key}-*"]
  }
  filter {
    name   = "tag:Commit"
    values = [var.commit]
  }
}
