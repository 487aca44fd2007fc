output "group_name" {
  description = "Name of the Auto Scaling group."
  value       = aws_autoscaling_group.role.name
}

output "end_policy_arn" {
  description = "Policy that sets the group to 0 hosts."
  value       = aws_autoscaling_policy.end.arn
}

output "group" {
  description = "The group as made: what tests read."
  value = {
    hosts              = aws_autoscaling_group.role.desired_capacity
    max_size           = aws_autoscaling_group.role.max_size
    capacity_rebalance = aws_autoscaling_group.role.capacity_rebalance
    maintenance        = one(aws_autoscaling_group.role.instance_maintenance_policy)
    refresh            = aws_autoscaling_group.role.instance_refresh[0].preferences[0]
    subnet_ids         = aws_autoscaling_group.role.vpc_zone_identifier
    distribution       = aws_autoscaling_group.role.mixed_instances_policy[0].instances_distribution[0]
    instance_types     = aws_autoscaling_group.role.mixed_instances_policy[0].launch_template[0].override[*].instance_type
  }
}

output "volume_gib" {
  description = "Size of a host's disk as made: what tests read."
  value       = aws_launch_template.role.block_device_mappings[0].ebs[0].volume_size
}
