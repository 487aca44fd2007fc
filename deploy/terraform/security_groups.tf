# Allowed connections: one group per role, and one of the endpoints. Every rule names another group or S3's prefix list;
# no rule names an address.

locals {
  # The three links, and AWS's APIs, client -> server; no other connection between hosts is allowed.
  links = merge(
    {
      actor-experience  = { client = "actor", server = "replay", port = local.ports.experience }
      learner-sampling  = { client = "learner", server = "replay", port = local.ports.sampling }
      actor-weights     = { client = "actor", server = "learner", port = local.ports.weights }
      evaluator-weights = { client = "evaluator", server = "learner", port = local.ports.weights }
    },
    { for role in local.roles : "${role}-endpoints" => { client = role, server = "endpoints", port = 443 } },
  )
}

resource "aws_security_group" "role" {
  for_each = setunion(local.roles, ["endpoints"])

  name        = "${var.name}-${each.key}"
  description = "Role ${each.key} of the fleet ${var.name}"
  vpc_id      = aws_vpc.fleet.id
  tags        = { Name = "${var.name}-${each.key}" }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "link" {
  for_each = local.links

  security_group_id            = aws_security_group.role[each.value.server].id
  referenced_security_group_id = aws_security_group.role[each.value.client].id
  description                  = each.key
  ip_protocol                  = "tcp"
  from_port                    = each.value.port
  to_port                      = each.value.port
}

resource "aws_vpc_security_group_egress_rule" "link" {
  for_each = local.links

  security_group_id            = aws_security_group.role[each.value.client].id
  referenced_security_group_id = aws_security_group.role[each.value.server].id
  description                  = each.key
  ip_protocol                  = "tcp"
  from_port                    = each.value.port
  to_port                      = each.value.port
}

data "aws_ec2_managed_prefix_list" "s3" {
  name = "com.amazonaws.${var.region}.s3"
}

resource "aws_vpc_security_group_egress_rule" "s3" {
  for_each = setsubtract(local.roles, ["actor"]) # an actor stores nothing

  security_group_id = aws_security_group.role[each.key].id
  prefix_list_id    = data.aws_ec2_managed_prefix_list.s3.id
  description       = "S3, through its endpoint"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}
