# Checkpoints, the replay's copy and results: everything of a run that must outlive an instance.

locals {
  own_buckets = var.bucket == "" ? 1 : 0
}

resource "aws_s3_bucket" "results" {
  count = local.own_buckets

  bucket_prefix = "${var.name}-"
  force_destroy = var.delete_results
  depends_on    = [aws_kms_key.fleet] # a bucket that may not be deleted keeps the key of its objects
}

data "aws_s3_bucket" "given" {
  count = 1 - local.own_buckets

  bucket = var.bucket
}

resource "aws_s3_bucket_versioning" "results" {
  count = local.own_buckets

  bucket = aws_s3_bucket.results[0].id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "results" {
  count = local.own_buckets

  bucket = aws_s3_bucket.results[0].id

  rule {
    bucket_key_enabled = true # one KMS call for many objects

    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.fleet.arn
    }
  }
}

resource "aws_s3_bucket_public_access_block" "results" {
  count = local.own_buckets

  bucket                  = aws_s3_bucket.results[0].id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_lifecycle_configuration" "results" {
  count = local.own_buckets

  bucket = aws_s3_bucket.results[0].id

  rule {
    id     = "what-nobody-needs"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
    noncurrent_version_expiration { # most objects are replaced every few minutes
      noncurrent_days = 1
    }
    expiration {
      expired_object_delete_marker = true
    }
  }

  depends_on = [aws_s3_bucket_versioning.results]
}

resource "aws_s3_bucket_policy" "results" {
  count = local.own_buckets

  bucket     = aws_s3_bucket.results[0].id
  depends_on = [aws_s3_bucket_public_access_block.results]
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "TlsOnly", Effect = "Deny", Action = "s3:*", Principal = { AWS = "*" }
      Resource  = [local.bucket_arn, "${local.bucket_arn}/*"]
      Condition = { Bool = { "aws:SecureTransport" = "false" } }
    }]
  })
}

# Terraform destroys this before the bucket and its settings. That fails if results may not be deleted, so that nothing
# changes; else Terraform would remove policy, versioning and encryption before S3 refuses to delete a full bucket.
resource "terraform_data" "results" {
  count = local.own_buckets

  input            = { bucket = aws_s3_bucket.results[0].id, may_go = var.delete_results }
  triggers_replace = aws_s3_bucket.results[0].id # replacing the bucket fails in the same way

  depends_on = [
    terraform_data.fleet, # which says the region of the bucket that stays
    aws_s3_bucket_lifecycle_configuration.results,
    aws_s3_bucket_policy.results,
    aws_s3_bucket_public_access_block.results,
    aws_s3_bucket_server_side_encryption_configuration.results,
    aws_s3_bucket_versioning.results,
  ]

  provisioner "local-exec" {
    when    = destroy
    command = self.output.may_go ? "exit 0" : "echo The bucket ${self.output.bucket} and its key stay as they are: delete_results is false. See deploy/terraform/README.md, Stop and destroy. && exit 1"
  }
}
