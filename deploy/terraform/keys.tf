# The fleet's KMS key: it encrypts the bucket, the logs and the alarms' messages.
#
# The CURVE keys of the links are not here, and so never in the state: deploy/push_keys.py creates them and writes them
# to Parameter Store under local.key_path, secret ones as SecureString. An instance reads its own at boot (iam.tf).

resource "aws_kms_key" "fleet" {
  description             = "Bucket, logs and alarms of the fleet ${var.name}"
  enable_key_rotation     = true
  deletion_window_in_days = 7
  policy                  = data.aws_iam_policy_document.fleet_key.json
}

resource "aws_kms_alias" "fleet" {
  name          = "alias/apex-jax-${var.name}"
  target_key_id = aws_kms_key.fleet.key_id
}

data "aws_iam_policy_document" "fleet_key" {
  #checkov:skip=CKV_AWS_109:A key's policy applies only to that key, which it can only name as "*"
  #checkov:skip=CKV_AWS_111:As CKV_AWS_109
  #checkov:skip=CKV_AWS_356:As CKV_AWS_109
  statement { # the IAM policies of the account decide who may use and manage the key
    sid       = "Account"
    effect    = "Allow"
    actions   = ["kms:*"]
    resources = ["*"]

    principals {
      type        = "AWS"
      identifiers = ["arn:aws:iam::${local.account_id}:root"]
    }
  }

  statement {
    sid       = "Logs"
    effect    = "Allow"
    actions   = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]
    resources = ["*"]

    principals {
      type        = "Service"
      identifiers = ["logs.${var.region}.amazonaws.com"]
    }
    condition {
      test     = "ArnLike"
      variable = "kms:EncryptionContext:aws:logs:arn"
      values   = ["arn:aws:logs:${var.region}:${local.account_id}:log-group:/apex-jax/${var.name}/*"]
    }
  }

  statement {
    sid       = "Alarms"
    effect    = "Allow"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey*"]
    resources = ["*"]

    principals {
      type        = "Service"
      identifiers = ["cloudwatch.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account_id]
    }
  }
}
