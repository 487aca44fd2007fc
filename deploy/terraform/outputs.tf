output "run_url" {
  description = "Where the run's checkpoints and results are."
  value       = local.run_url
}

output "estimated_usd" {
  description = "Estimated cost in US dollars of an hour and of a month (730 hours) of the running fleet, and of a month of the stopped fleet (prices.tf)."
  value = merge(
    { for name, usd in local.estimated_usd : name => local.prices_known ? usd : "unknown: prices.tf lacks a chosen instance type" },
    { prices = "us-east-1, 2026-11" }, # those of other regions are not known here
  )
}

output "commands" {
  description = "Commands for daily use, ready to paste in the repository's root."
  value = {
    watch   = "aws logs tail ${aws_cloudwatch_log_group.role["learner"].name} --follow --region ${var.region}"
    why     = "for group in ${join(" ", local.group_names)}; do echo $group; aws autoscaling describe-scaling-activities --region ${var.region} --auto-scaling-group-name $group --no-paginate --query 'Activities[:5].[StartTime,StatusCode,Description,StatusMessage]' --output text; done  # why a role has no host"
    rollout = "for group in ${join(" ", local.group_names)}; do echo $group; aws autoscaling describe-instance-refreshes --region ${var.region} --auto-scaling-group-name $group --no-paginate --query 'InstanceRefreshes[:3].[StartTime,Status,PercentageComplete,StatusReason]' --output text; done  # whether all hosts are of the last apply"
    shell   = "aws ssm start-session --region ${var.region} --target ${local.find_learner}"
    status  = "aws ssm start-session --region ${var.region} --target ${local.find_learner} --document-name AWS-StartPortForwardingSession --parameters portNumber=${local.ports.status},localPortNumber=${local.ports.status}  # then python main.py status tcp://127.0.0.1:${local.ports.status}"
    fetch   = "AWS_REGION=${var.region} python main.py storage pull ${local.run_url} ${var.run} && aws s3 sync ${local.run_url}/results ${var.run} --region ${var.region}"
    actors  = "terraform -chdir=deploy/terraform apply -var actor_hosts=N"
    stop    = "terraform -chdir=deploy/terraform apply -var running=false"
    wait    = "(while hosts=$(${local.find_hosts}) || exit; [ -n \"$hosts\" ]; do sleep 10; done)  # after stop: until the last host has saved and gone"
    images  = "for image in $(aws ec2 describe-images --region ${var.region} --owners self --filters Name=tag:Project,Values=apex-jax --query \"Images[?Tags[?Key=='Commit'&&Value!='${var.commit}']].ImageId\" --output text); do aws ec2 deregister-image --region ${var.region} --delete-associated-snapshots --image-id $image; done  # removes the images of all other commits, also those that another fleet of this region runs"
    destroy = "terraform -chdir=deploy/terraform apply -var running=false -var delete_results=true && terraform -chdir=deploy/terraform destroy -var delete_results=true  # after stop, wait and fetch: the results go, too, unless the bucket was given"
  }
}

locals {
  group_names = values(aws_autoscaling_group.role)[*].name
  find_hosts = format(
    "aws ec2 describe-instances --region %s --filters Name=tag:Fleet,Values=%s Name=instance-state-name,Values=pending,running,stopping,shutting-down --query 'Reservations[].Instances[].InstanceId' --output text",
    var.region, var.name
  )
  find_learner = format(
    "$(aws ec2 describe-instances --region %s --filters Name=tag:Fleet,Values=%s Name=tag:Role,Values=learner Name=instance-state-name,Values=running --query 'Reservations[0].Instances[0].InstanceId' --output text)",
    var.region, var.name
  )
}

# --- what the tests read ---

output "user_data" {
  description = "Cloud-init user data of each role; no secret is in it."
  value       = local.user_data
}
