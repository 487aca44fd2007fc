# Both images from one template: cpu (replay, actor, evaluator) on Ubuntu, gpu (learner) on AWS's Deep Learning base
# image, which is Ubuntu with NVIDIA's driver. Each build runs on an instance of the kind that will run its image.

locals {
  timestamp = formatdate("YYYYMMDD-hhmmss", timestamp())
  source    = "/tmp/apex-jax.tar.gz"

  tags = {
    Project = "apex-jax"
    Commit  = var.commit
  }
}

source "amazon-ebs" "ubuntu" {
  region        = var.region
  subnet_id     = var.subnet_id
  ssh_username  = "ubuntu"
  ssh_interface = "session_manager" # no open port
  ssh_timeout   = "40m"             # the agent sleeps for half an hour if it starts before its role's policy is visible
  communicator  = "ssh"

  ssh_clear_authorized_keys = true # removes the build's temporary key from the image

  temporary_iam_instance_profile_policy_document { # only what Session Manager needs
    Version = "2012-10-17"

    Statement {
      Effect   = "Allow"
      Resource = ["*"]
      Action = [
        "ssm:UpdateInstanceInformation",
        "ssmmessages:CreateControlChannel",
        "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel",
        "ssmmessages:OpenDataChannel",
      ]
    }
  }

  imds_support = "v2.0" # instances of the image allow only IMDSv2

  metadata_options { # so does the build's instance
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  tags          = local.tags
  run_tags      = local.tags
  snapshot_tags = local.tags
}

build {
  name = "apex-jax"

  source "amazon-ebs.ubuntu" {
    name          = "cpu"
    ami_name      = "apex-jax-cpu-${substr(var.commit, 0, 12)}-${local.timestamp}"
    instance_type = "c7i.large"

    source_ami_filter {
      owners      = ["099720109477"] # Canonical
      most_recent = true

      filters = {
        # 24.04, maintained until 2029, has Python 3.12; 26.04 (3.14, as far as known here) is too new for the project.
        name                = "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-*"
        virtualization-type = "hvm"
        root-device-type    = "ebs"
      }
    }

    launch_block_device_mappings {
      device_name           = "/dev/sda1"
      volume_size           = 16
      volume_type           = "gp3"
      encrypted             = true # and so the image: without a second, encrypted copy
      delete_on_termination = true
    }
  }

  source "amazon-ebs.ubuntu" {
    name          = "gpu"
    ami_name      = "apex-jax-gpu-${substr(var.commit, 0, 12)}-${local.timestamp}"
    instance_type = var.gpu_instance_type

    source_ami_filter {
      owners      = ["amazon"]
      most_recent = true

      filters = {
        name                = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) *"
        architecture        = "x86_64"
        virtualization-type = "hvm"
        root-device-type    = "ebs"
      }
    }

    launch_block_device_mappings {
      device_name           = "/dev/sda1"
      volume_size           = 100 # the base image has 75, for several versions of CUDA; learners have at least 100
      volume_type           = "gp3"
      encrypted             = true # and so the image: without a second, encrypted copy
      delete_on_termination = true
    }
  }

  # Updates, and a reboot into the kernel that instances of the image will boot: what is tried is what runs. Nothing else
  # may install a kernel meanwhile, or later. Not tried on AWS; compare, for Ubuntu, ParallelCluster's
  # cli/src/pcluster/resources/imagebuilder/update_and_reboot.yaml.
  provisioner "shell" {
    inline = [
      "cloud-init status --wait || true", # a fresh instance may still hold apt's lock
      "sudo systemctl mask --now apt-daily.timer apt-daily-upgrade.timer apt-daily.service apt-daily-upgrade.service unattended-upgrades.service",
      "sudo apt-get -q -o DPkg::Lock::Timeout=600 update",
      "sudo DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=600 -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold --with-new-pkgs upgrade",
      "sudo DEBIAN_FRONTEND=noninteractive apt-get -q -y install linux-headers-aws || true", # the driver is built for the new kernel
    ]
  }
  provisioner "shell" {
    inline            = ["sudo reboot"]
    expect_disconnect = true
  }

  provisioner "shell" {
    pause_before        = "2m" # until the tunnel of Session Manager has noticed the reboot
    start_retry_timeout = "15m"
    inline              = ["uname -r"]
  }

  # Only the files of the commit, whatever else is in the checkout; git archive writes the commit's id into the file.
  provisioner "shell-local" {
    inline = ["git -C ${path.root}/../.. archive --format=tar.gz -o /tmp/apex-jax-${source.name}.tar.gz ${var.commit}"]
  }

  provisioner "file" { # after the reboot, which empties /tmp
    source      = "/tmp/apex-jax-${source.name}.tar.gz"
    destination = local.source
    generated   = true # by the previous step
  }

  provisioner "file" {
    source      = "${path.root}/../provision.sh"
    destination = "/tmp/provision.sh"
  }

  provisioner "shell" {
    inline = [
      "sudo bash /tmp/provision.sh ${local.source} --log-agent ${source.name == "gpu" ? "--gpu" : ""}",
      "sudo bash /opt/apex-jax/current/deploy/smoke_test.sh ${source.name == "gpu" ? "--gpu" : ""}",
      "sudo rm -rf ${local.source} /tmp/provision.sh /root/.cache /home/ubuntu/.cache",
      "sudo cloud-init clean --logs --machine-id", # so that instances of the image get ids of their own
    ]
  }
}
