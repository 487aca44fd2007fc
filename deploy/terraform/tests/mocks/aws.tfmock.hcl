# Answers of the mocked provider for values that are checked: names, ids and documents.

mock_data "aws_caller_identity" {
  defaults = { account_id = "123456789012" }
}

mock_data "aws_availability_zones" {
  defaults = { names = ["us-east-1a", "us-east-1b", "us-east-1c"] }
}

mock_data "aws_ec2_instance_type_offerings" {
  defaults = { instance_types = ["r7i.large", "r7i.xlarge", "g6.xlarge", "g6.2xlarge", "g6.12xlarge"] }
}

mock_data "aws_s3_bucket" {
  defaults = { region = "us-east-1" }
}

mock_resource "aws_kms_key" {
  defaults = { arn = "arn:aws:kms:us-east-1:123456789012:key/00000000-0000-0000-0000-000000000000" }
}

mock_resource "aws_cloudwatch_log_group" {
  defaults = { arn = "arn:aws:logs:us-east-1:123456789012:log-group:mocked" }
}

mock_resource "aws_sns_topic" {
  defaults = { arn = "arn:aws:sns:us-east-1:123456789012:mocked" }
}

mock_resource "aws_autoscaling_policy" {
  defaults = { arn = "arn:aws:autoscaling:us-east-1:123456789012:scalingPolicy:mocked" }
}

mock_data "aws_ami_ids" {
  defaults = { ids = ["ami-0fedcba9876543210"] }
}

mock_data "aws_vpc_endpoint_service" {
  defaults = { availability_zones = ["us-east-1a", "us-east-1b", "us-east-1c"] }
}

mock_data "aws_servicequotas_service_quota" {
  defaults = { value = 1000, quota_name = "mocked" }
}
