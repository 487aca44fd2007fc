# The permissions of each role in AWS, and no others. Instances have no other credentials.

resource "aws_iam_role" "role" {
  for_each = local.roles

  name        = "${var.name}-${var.region}-${each.key}"
  description = "Instances of the role ${each.key} of the fleet ${var.name}"
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = "ec2.amazonaws.com" } }]
  })
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
  policy = jsonencode({ Version = "2012-10-17", Statement = [for one in local.statements[each.key] : one if length(one.Resource) > 0] })
}

locals {
  stored     = "${local.bucket_arn}/${local.run_prefix}"
  is_storing = { for role in local.roles : role => role != "actor" } # an actor stores nothing
  is_named   = { for role in local.roles : role => contains(keys(local.host), role) }

  statements = { # by role; those without a resource are left out
    for role in local.roles : role => [
      {
        Sid      = "SessionManager", Effect = "Allow"
        Resource = "*" # these actions do not support resources
        Action   = concat(["ssm:UpdateInstanceInformation"], local.api_actions.ssmmessages)
      },
      { # SecureStrings are encrypted with AWS's own key, which needs no extra permission; public keys are no secret
        Sid      = "Keys", Effect = "Allow", Action = "ssm:GetParameter"
        Resource = [for file in ["${role}.secret", "*.public"] : "arn:aws:ssm:${var.region}:${local.account_id}:parameter${local.key_path}/${file}"]
      },
      {
        Sid      = "Logs", Effect = "Allow", Action = local.api_actions.logs
        Resource = "${aws_cloudwatch_log_group.role[role].arn}:*"
      },
      {
        Sid       = "Health", Effect = "Allow", Action = "cloudwatch:PutMetricData", Resource = "*"
        Condition = { StringEquals = { "cloudwatch:namespace" = local.metric_namespaces[role] } }
      },
      {
        Sid       = "ListRun", Effect = "Allow", Action = "s3:ListBucket"
        Resource  = local.is_storing[role] ? [local.bucket_arn] : []
        Condition = { StringLike = { "s3:prefix" = [local.run_prefix, "${local.run_prefix}/*"] } }
      },
      { # its copy of the run's state; it deletes files that the run no longer has
        Sid      = "State", Effect = "Allow", Action = setsubtract(local.s3_actions, ["s3:ListBucket"])
        Resource = contains(local.state_keepers, role) ? ["${local.stored}/${role}/*"] : []
      },
      { # its own results, without permission to delete
        Sid      = "Results", Effect = "Allow", Action = ["s3:GetObject", "s3:PutObject"]
        Resource = local.is_storing[role] ? [for name in local.result_files[role] : "${local.stored}/results/${name}"] : []
      },
      {
        Sid       = "RunEncryption", Effect = "Allow", Action = ["kms:Decrypt", "kms:GenerateDataKey"]
        Resource  = local.is_storing[role] ? compact([local.bucket_key_arn]) : []
        Condition = { StringEquals = { "kms:ViaService" = "s3.${var.region}.amazonaws.com" } }
      },
      { # its own private name only
        Sid      = "Name", Effect = "Allow", Action = "servicediscovery:RegisterInstance"
        Resource = local.is_named[role] ? [aws_service_discovery_service.host[role].arn] : []
      },
      { # the DNS record of that name, which Cloud Map writes with the instance's permissions
        Sid      = "NameRecord", Effect = "Allow", Action = "route53:ChangeResourceRecordSets"
        Resource = local.is_named[role] ? [local.zone_arn] : []
        # No condition on the kind of change: AWS does not document which kind Cloud Map uses to replace a record.
        Condition = { "ForAllValues:StringEquals" = {
          "route53:ChangeResourceRecordSetsNormalizedRecordNames" = lookup(local.host, role, "")
          "route53:ChangeResourceRecordSetsRecordTypes"           = "A"
        } }
      },
      { # Cloud Map also needs this statement and the next one
        Sid      = "NameZone", Effect = "Allow", Action = "route53:GetHostedZone"
        Resource = local.is_named[role] ? [local.zone_arn] : []
      },
      {
        Sid      = "NameLookup", Effect = "Allow", Action = ["route53:ListHostedZonesByName", "servicediscovery:GetOperation"]
        Resource = local.is_named[role] ? ["*"] : []
      },
    ]
  }
}
