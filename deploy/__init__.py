"""The fleet on EC2: images, hosts, Terraform. See deploy/README.md."""
