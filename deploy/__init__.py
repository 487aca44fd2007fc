"""The fleet on EC2: images, hosts, Terraform. See deploy/terraform/README.md."""
