# The fleet's KMS key: it encrypts the bucket, the logs and the alarms' messages.
#
# The CURVE keys of the links are not here, and so never in the state: deploy/push_keys.py creates them and writes them
# to Parameter Store under local.key_path, secret ones as SecureString. An instance reads its own at boot (iam.tf).

resource "aws_kms_key" "fleet" {
  description             = "Bucket, logs and alarms of the fleet ${var.name}"
  enable_key_rotation     = true
  deletion_window_in_days = 7
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      { # the IAM policies of the account decide who may use and manage the key
        Sid       = "Account", Effect = "Allow", Action = "kms:*", Resource = "*"
        Principal = { AWS = "arn:aws:iam::${local.account_id}:root" }
      },
      {
        Sid       = "Logs", Effect = "Allow", Resource = "*"
        Action    = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]
        Principal = { Service = "logs.${var.region}.amazonaws.com" }
        Condition = { ArnLike = {
          "kms:EncryptionContext:aws:logs:arn" = "arn:aws:logs:${var.region}:${local.account_id}:log-group:/apex-jax/${var.name}/*"
        } }
      },
      {
        Sid       = "Alarms", Effect = "Allow", Action = ["kms:Decrypt", "kms:GenerateDataKey*"], Resource = "*"
        Principal = { Service = "cloudwatch.amazonaws.com" }
        Condition = { StringEquals = { "aws:SourceAccount" = local.account_id } }
      },
    ]
  })
}

resource "aws_kms_alias" "fleet" {
  name          = "alias/apex-jax-${var.name}"
  target_key_id = aws_kms_key.fleet.key_id
}
