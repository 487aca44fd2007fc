# The permissions of each role in AWS, and no others. Instances have no other credentials.

data "aws_iam_policy_document" "assume" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "role" {
  for_each = local.roles

  name               = "${var.name}-${var.region}-${each.key}"
  description        = "Instances of the role ${each.key} of the fleet ${var.name}"
  assume_role_policy = data.aws_iam_policy_document.assume.json
}

resource "aws_iam_instance_profile" "role" {
  for_each = local.roles

  name = aws_iam_role.role[each.key].name
  role = aws_iam_role.role[each.key].name
}

resource "aws_iam_role_policy" "role" {
  for_each = local.roles

  name   = "fleet"
  role   = aws_iam_role.role[each.key].id
  policy = data.aws_iam_policy_document.role[each.key].json
}

data "aws_iam_policy_document" "role" {
  #checkov:skip=CKV_AWS_111:The write actions on "*" do not support resources: agent channels, metrics of one namespace
  #checkov:skip=CKV_AWS_356:As CKV_AWS_111
  for_each = local.roles

  statement {
    sid       = "SessionManager"
    resources = ["*"] # these actions do not support resources
    actions = [
      "ssm:UpdateInstanceInformation",
      "ssmmessages:CreateControlChannel",
      "ssmmessages:CreateDataChannel",
      "ssmmessages:OpenControlChannel",
      "ssmmessages:OpenDataChannel",
    ]
  }

  statement { # SecureStrings are encrypted with AWS's own key, which needs no extra permission
    sid     = "Keys"
    actions = ["ssm:GetParameter"]
    resources = [
      for file in local.key_files[each.key] : "arn:aws:ssm:${var.region}:${local.account_id}:parameter${local.key_path}/${file}"
    ]
  }

  statement {
    sid       = "Logs"
    actions   = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
    resources = ["${aws_cloudwatch_log_group.role[each.key].arn}:*"]
  }

  statement {
    sid       = "Health"
    actions   = ["cloudwatch:PutMetricData"]
    resources = ["*"]

    condition {
      test     = "StringEquals"
      variable = "cloudwatch:namespace"
      values   = [local.metric_namespace]
    }
  }

  dynamic "statement" { # an actor stores nothing
    for_each = each.key == "actor" ? [] : [local.bucket_arn]

    content {
      sid       = "ListRun"
      actions   = ["s3:ListBucket"]
      resources = [statement.value]

      condition {
        test     = "StringLike"
        variable = "s3:prefix"
        values   = [local.run_prefix, "${local.run_prefix}/*"]
      }
    }
  }

  dynamic "statement" { # its copy of the run's state; it deletes files that the run no longer has
    for_each = contains(local.state_keepers, each.key) ? [["${local.bucket_arn}/${local.run_prefix}/${each.key}/*"]] : []

    content {
      sid       = "State"
      actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
      resources = statement.value
    }
  }

  dynamic "statement" { # its own results, without permission to delete
    for_each = each.key == "actor" ? [] : [[for name in local.result_files[each.key] : "${local.bucket_arn}/${local.run_prefix}/results/${name}"]]

    content {
      sid       = "Results"
      actions   = ["s3:GetObject", "s3:PutObject"]
      resources = statement.value
    }
  }

  dynamic "statement" {
    for_each = each.key == "actor" || local.bucket_key_arn == "" ? [] : [local.bucket_key_arn]

    content {
      sid       = "RunEncryption"
      actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
      resources = [statement.value]

      condition {
        test     = "StringEquals"
        variable = "kms:ViaService"
        values   = ["s3.${var.region}.amazonaws.com"]
      }
    }
  }

  dynamic "statement" { # its own private name only
    for_each = contains(keys(local.host), each.key) ? [[aws_service_discovery_service.host[each.key].arn]] : []

    content {
      sid       = "Name"
      actions   = ["servicediscovery:RegisterInstance"]
      resources = statement.value
    }
  }

  dynamic "statement" { # the DNS record of that name, which Cloud Map writes with the instance's permissions
    for_each = contains(keys(local.host), each.key) ? [local.zone_arn] : []

    content {
      sid       = "NameRecord"
      actions   = ["route53:ChangeResourceRecordSets"]
      resources = [statement.value]

      # No condition on the kind of change: AWS does not document which kind Cloud Map uses to replace a record.
      condition {
        test     = "ForAllValues:StringEquals"
        variable = "route53:ChangeResourceRecordSetsNormalizedRecordNames"
        values   = [local.host[each.key]]
      }
      condition {
        test     = "ForAllValues:StringEquals"
        variable = "route53:ChangeResourceRecordSetsRecordTypes"
        values   = ["A"]
      }
    }
  }

  dynamic "statement" { # Cloud Map also needs this statement and the next one
    for_each = contains(keys(local.host), each.key) ? [local.zone_arn] : []

    content {
      sid       = "NameZone"
      actions   = ["route53:GetHostedZone"]
      resources = [statement.value]
    }
  }

  dynamic "statement" {
    for_each = contains(keys(local.host), each.key) ? ["*"] : []

    content {
      sid       = "NameLookup"
      actions   = ["route53:ListHostedZonesByName", "servicediscovery:GetOperation"]
      resources = [statement.value]
    }
  }
}
