# A VPC without a route in or out: private subnets, no internet gateway, no NAT. Instances reach the services of AWS
# through endpoints (endpoints.tf). With var.vpc_id, the VPC's own parts are not made, nor are endpoints: it has them.

data "aws_availability_zones" "available" {
  #checkov:skip=CKV_AWS_394:Names are sorted, and only the first is used: a zone that AWS adds comes later
  state = "available"

  filter { # no local or wavelength zones
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

# The instance types of replay and learner that their zone offers.
data "aws_ec2_instance_type_offerings" "first_zone" {
  count = local.own_vpc ? 1 : 0

  location_type = "availability-zone"

  filter {
    name   = "location"
    values = [local.zone_names[0]]
  }
  filter {
    name   = "instance-type"
    values = concat(local.instance_types.replay, local.instance_types.learner)
  }
}

locals {
  own_vpc    = var.vpc_id == ""
  vpc_id     = local.own_vpc ? aws_vpc.fleet[0].id : var.vpc_id
  subnet_ids = local.own_vpc ? [for zone in local.zone_names : aws_subnet.private[zone].id] : var.subnet_ids
  zone_names = length(var.zone_names) > 0 ? var.zone_names : [data.aws_availability_zones.available.names[0]]
  vpc_cidr   = "10.83.0.0/16" # an eighth, which a zone has, holds 8,000 hosts

  roles_without_type = [
    for role in ["replay", "learner"] : role if local.own_vpc && length(setintersection(
      local.instance_types[role], flatten(data.aws_ec2_instance_type_offerings.first_zone[*].instance_types)
    )) == 0
  ]
}

resource "aws_vpc" "fleet" {
  #checkov:skip=CKV2_AWS_11:Only the fleet's own hosts can send here; a refused connection is in the log of its role
  count = local.own_vpc ? 1 : 0

  cidr_block           = local.vpc_cidr
  enable_dns_support   = true
  enable_dns_hostnames = true # needed for the endpoints' private names
  tags                 = { Name = var.name }
}

# A zone's letter determines its eighth of the addresses, so another choice of zones does not renumber those that stay.
resource "aws_subnet" "private" {
  for_each = toset(local.own_vpc ? local.zone_names : [])

  vpc_id                  = aws_vpc.fleet[0].id
  cidr_block              = cidrsubnet(local.vpc_cidr, 3, index(split("", "abcdefgh"), substr(each.key, -1, 1)))
  availability_zone       = each.key
  map_public_ip_on_launch = false
  tags                    = { Name = "${var.name}-private-${each.key}" }

  lifecycle {
    create_before_destroy = true # groups leave a subnet before it is destroyed
  }
}

resource "aws_route_table" "private" {
  count = local.own_vpc ? 1 : 0

  vpc_id = aws_vpc.fleet[0].id # only the local route, and that of S3, which its endpoint adds
  tags   = { Name = "${var.name}-private" }
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private[0].id
}

# Nothing uses the VPC's default group; without rules nothing can use it by mistake.
resource "aws_default_security_group" "unused" {
  count = local.own_vpc ? 1 : 0

  vpc_id = aws_vpc.fleet[0].id
}

# --- the names replay.NAME.internal and learner.NAME.internal ---

resource "aws_service_discovery_private_dns_namespace" "fleet" {
  name        = local.domain
  description = "Replay and learner of the fleet ${var.name}, wherever they run now."
  vpc         = local.vpc_id
}

# An instance registers itself at boot under the role's name, so that a replacement takes over the record.
resource "aws_service_discovery_service" "host" {
  for_each = local.host

  name          = each.key
  force_destroy = true # also deletes the records that instances have registered

  dns_config {
    namespace_id   = aws_service_discovery_private_dns_namespace.fleet.id
    routing_policy = "MULTIVALUE"

    dns_records {
      type = "A"
      ttl  = 10 # seconds for which peers may use the address of a replaced instance
    }
  }
}
