# A VPC without a route in or out: private subnets, no internet gateway, no NAT. Instances reach the services of AWS
# through endpoints (endpoints.tf).

data "aws_availability_zones" "available" {
  state = "available"

  filter { # no local or wavelength zones
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

# Not every zone has every endpoint: AWS names the zones of each service (DescribeVpcEndpointServices;
# not tried on AWS).
data "aws_vpc_endpoint_service" "interface" {
  for_each = local.api_actions

  service      = each.key
  service_type = "Interface"
}

# The instance types of replay and learner that their zone offers.
data "aws_ec2_instance_type_offerings" "first_zone" {
  location_type = "availability-zone"

  filter {
    name   = "location"
    values = [try(local.zone_names[0], "none")] # then a rule says which there are
  }
  filter {
    name   = "instance-type"
    values = concat(local.instance_types.replay, local.instance_types.learner)
  }
}

locals {
  usable_zones = sort(setintersection(
    data.aws_availability_zones.available.names,
    [for service in data.aws_vpc_endpoint_service.interface : service.availability_zones]...
  ))
  subnet_ids = [for zone in local.zone_names : aws_subnet.private[zone].id]
  zone_names = length(var.zone_names) > 0 ? var.zone_names : slice(local.usable_zones, 0, min(1, length(local.usable_zones)))
  vpc_cidr   = "10.83.0.0/16" # an eighth, which a zone has, holds 8,000 hosts

  roles_without_type = [
    for role in ["replay", "learner"] : role
    if length(setintersection(local.instance_types[role], data.aws_ec2_instance_type_offerings.first_zone.instance_types)) == 0
  ]
}

resource "aws_vpc" "fleet" {
  cidr_block           = local.vpc_cidr
  enable_dns_support   = true
  enable_dns_hostnames = true # needed for the endpoints' private names
  tags                 = { Name = var.name }
}

# A zone's letter determines its eighth of the addresses, so another choice of zones does not renumber those that stay.
resource "aws_subnet" "private" {
  for_each = toset(local.zone_names)

  vpc_id                  = aws_vpc.fleet.id
  cidr_block              = cidrsubnet(local.vpc_cidr, 3, index(split("", "abcdefgh"), substr(each.key, -1, 1)))
  availability_zone       = each.key
  map_public_ip_on_launch = false
  tags                    = { Name = "${var.name}-private-${each.key}" }

  lifecycle {
    create_before_destroy = true # groups leave a subnet before it is destroyed
  }
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.fleet.id # only the local route, and that of S3, which its endpoint adds
  tags   = { Name = "${var.name}-private" }
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private.id
}

# Nothing uses the VPC's default group; without rules nothing can use it by mistake.
resource "aws_default_security_group" "unused" {
  vpc_id = aws_vpc.fleet.id
}

# --- the names replay.NAME.internal and learner.NAME.internal ---

resource "aws_service_discovery_private_dns_namespace" "fleet" {
  name        = local.domain
  description = "Replay and learner of the fleet ${var.name}, wherever they run now."
  vpc         = aws_vpc.fleet.id
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
