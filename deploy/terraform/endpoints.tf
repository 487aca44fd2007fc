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

  # With credentials of another account, even stolen ones, no data can leave through these endpoints.
  own_account = {
    Effect    = "Allow"
    Principal = { AWS = "*" }
    Condition = { StringEquals = { "aws:PrincipalAccount" = local.account_id } }
  }
}

resource "aws_vpc_endpoint" "interface" {
  for_each = var.running ? local.api_actions : {}

  vpc_id              = aws_vpc.fleet.id
  service_name        = "com.amazonaws.${var.region}.${each.key}"
  vpc_endpoint_type   = "Interface"
  private_dns_enabled = true
  subnet_ids          = local.subnet_ids
  security_group_ids  = [aws_security_group.role["endpoints"].id]
  policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [merge(local.own_account, { Action = each.value, Resource = "*" })]
  })
  tags = { Name = "${var.name}-${each.key}" }

  lifecycle {
    create_before_destroy = true # so running=false stops the groups before it removes these
  }
}

resource "aws_vpc_endpoint" "s3" { # without an hourly price
  vpc_id            = aws_vpc.fleet.id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.private.id]
  policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [merge(local.own_account, { Action = local.s3_actions, Resource = [local.bucket_arn, "${local.bucket_arn}/*"] })]
  })
  tags = { Name = "${var.name}-s3" }
}
