output "run_url" {
  description = "Where the run's checkpoints and results are."
  value       = local.run_url
}

output "log_groups" {
  description = "Log group of each role."
  value       = { for role, group in aws_cloudwatch_log_group.role : role => group.name }
}

output "estimated_usd" {
  description = "Estimated cost in US dollars of an hour and of a month (730 hours) of the running fleet, of the traffic between zones in that month, and of a month of the stopped fleet (prices.tf)."
  value = merge(
    { for name, usd in local.estimated_usd : name => local.prices_known ? usd : "unknown: prices.tf lacks a chosen instance type" },
    { prices = var.region == local.price_region ? "${local.price_region}, 2026-11" : "${local.price_region}, 2026-11: ${var.region} has prices of its own, which are not known here" },
  )
}

output "commands" {
  description = "Commands for daily use, ready to paste in the repository's root."
  value = {
    watch   = "aws logs tail ${aws_cloudwatch_log_group.role["learner"].name} --follow --region ${var.region}"
    why     = "for group in ${join(" ", local.group_names)}; do echo $group; aws autoscaling describe-scaling-activities --region ${var.region} --auto-scaling-group-name $group --no-paginate --query 'Activities[:5].[StartTime,StatusCode,StatusMessage]' --output text; done  # why a role has no host"
    rollout = "for group in ${join(" ", local.group_names)}; do echo $group; aws autoscaling describe-instance-refreshes --region ${var.region} --auto-scaling-group-name $group --no-paginate --query 'InstanceRefreshes[:3].[StartTime,Status,PercentageComplete,StatusReason]' --output text; done  # whether all hosts are of the last apply"
    shell   = "aws ssm start-session --region ${var.region} --target ${local.find_instance.learner}"
    status  = "aws ssm start-session --region ${var.region} --target ${local.find_instance.learner} --document-name AWS-StartPortForwardingSession --parameters portNumber=${local.ports.status},localPortNumber=${local.ports.status}  # then python main.py status tcp://127.0.0.1:${local.ports.status}"
    fetch   = "AWS_REGION=${var.region} python main.py storage pull ${local.run_url} ${var.run} && aws s3 sync ${local.run_url}/results ${var.run} --region ${var.region}"
    actors  = "terraform -chdir=deploy/terraform apply -var actor_hosts=N"
    stop    = "terraform -chdir=deploy/terraform apply -var running=false"
    wait    = "while ${local.find_hosts} | grep -q i-; do sleep 10; done  # after stop: until the last host has saved and gone"
    destroy = "terraform -chdir=deploy/terraform apply -var running=false -var delete_results=true && terraform -chdir=deploy/terraform destroy -var delete_results=true  # after stop, wait and fetch: the results go, too, unless the bucket was given"
  }
}

locals {
  group_names = concat(module.replay[*].group_name, [module.learner.group_name, module.actor.group_name], module.evaluator[*].group_name)
  find_hosts = format(
    "aws ec2 describe-instances --region %s --filters Name=tag:Fleet,Values=%s Name=instance-state-name,Values=pending,running,stopping,shutting-down --query 'Reservations[].Instances[].InstanceId' --output text",
    var.region, var.name
  )
  find_instance = {
    for role in ["replay", "learner"] : role => format(
      "$(aws ec2 describe-instances --region %s --filters Name=tag:Fleet,Values=%s Name=tag:Role,Values=%s Name=instance-state-name,Values=running --query 'Reservations[0].Instances[0].InstanceId' --output text)",
      var.region, var.name, role
    )
  }
}

# --- what the tests read ---

output "user_data" {
  description = "Cloud-init user data of each role, and of each replay server by its name; no secret is in it."
  value       = local.user_data
}
