# The AWS APIs that instances use, at addresses inside the VPC. The price of interface endpoints is per hour and zone.

locals {
  # Service -> the actions allowed through its endpoint.
  api_actions = {
    logs             = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
    monitoring       = ["cloudwatch:PutMetricData"]
    servicediscovery = ["servicediscovery:RegisterInstance", "servicediscovery:GetOperation"]
    ssm              = ["ssm:GetParameter", "ssm:UpdateInstanceInformation"]
    ssmmessages = [
      "ssmmessages:CreateControlChannel",
      "ssmmessages:CreateDataChannel",
      "ssmmessages:OpenControlChannel",
      "ssmmessages:OpenDataChannel",
    ]
  }
  s3_actions = ["s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
}

# None in an existing VPC: there they would answer for everybody, with rules that admit the fleet alone.
resource "aws_vpc_endpoint" "interface" {
  for_each = var.running && local.own_vpc ? local.api_actions : {}

  vpc_id              = local.vpc_id
  service_name        = "com.amazonaws.${var.region}.${each.key}"
  vpc_endpoint_type   = "Interface"
  private_dns_enabled = true
  subnet_ids          = local.subnet_ids
  security_group_ids  = [aws_security_group.endpoints[0].id]
  policy              = data.aws_iam_policy_document.endpoint[each.key].json
  tags                = { Name = "${var.name}-${each.key}" }

  lifecycle {
    create_before_destroy = true # so running=false stops the groups before it removes these
  }
}

resource "aws_vpc_endpoint" "s3" {
  count = local.own_vpc ? 1 : 0 # it has no hourly price

  vpc_id            = local.vpc_id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.private[0].id]
  policy = jsonencode({ # apart from the others: through them the bucket would be made before it is destroyed, past its guard
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow", Principal = { AWS = "*" }, Action = local.s3_actions
      Resource  = [local.bucket_arn, "${local.bucket_arn}/*"]
      Condition = { StringEquals = { "aws:PrincipalAccount" = local.account_id } }
    }]
  })
  tags = { Name = "${var.name}-s3" }
}

# With credentials of another account, even stolen ones, no data can leave through these endpoints.
data "aws_iam_policy_document" "endpoint" {
  #checkov:skip=CKV_AWS_111:The roles' own policies name the resources (iam.tf); this one limits account and actions
  #checkov:skip=CKV_AWS_356:As CKV_AWS_111
  #checkov:skip=CKV_AWS_283:The condition limits the principals to those of this account
  for_each = local.api_actions

  statement {
    effect    = "Allow"
    actions   = each.value
    resources = ["*"]

    principals {
      type        = "AWS"
      identifiers = ["*"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:PrincipalAccount"
      values   = [local.account_id]
    }
  }
}
