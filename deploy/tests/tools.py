"""Terraform, and AWS imitated by moto, for the tests of deploy/ (`make test-deploy`)."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.rigs.processes import ROOT, wait_until

DEPLOY = ROOT / "deploy"
TERRAFORM = DEPLOY / "terraform"
REGION = "us-east-1"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": REGION,
    "AWS_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
}
PROVIDER_FOLDERS = ("/opt/*", "/usr/local/share/terraform/*", "/usr/share/terraform/*", f"{Path.home()}/.terraform.d/*")
SERVICES = (
    "autoscaling", "cloudwatch", "ec2", "iam", "kms", "logs", "route53", "s3", "servicediscovery", "sns",
    "ssm", "sts",
)  # fmt: skip
RULES = (("ingress", "link"), ("egress", "link"), ("egress", "s3"))


def copy_of_terraform(folder: Path) -> Path:
    """Returns a copy of deploy/terraform to work in: the checkout stays free of providers and states."""
    copy = folder / "terraform"
    shutil.copytree(TERRAFORM, copy, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
    return copy


class Terraform:
    """Terraform in one folder, with the provider from a local mirror if there is one."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None):
        self.folder = folder
        config = folder / "cli.tfrc"
        config.write_text(_mirror())
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TF_", "AWS_"))},
            "TF_CLI_CONFIG_FILE": str(config),
            "TF_IN_AUTOMATION": "1",
            "CHECKPOINT_DISABLE": "1",
            **CREDENTIALS,
            **(environment or {}),
        }

    def run(self, *arguments: str, seconds: float = 300, codes: tuple[int, ...] = (0,)) -> str:
        """Runs a command and returns its output; its exit code must be one of `codes`."""
        done = subprocess.run(
            ["terraform", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        assert done.returncode in codes, f"terraform {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def init(self) -> None:
        self.run("init", "-input=false", "-no-color")


def rendered_user_data(folder: Path, *variables: str) -> dict[str, str]:
    """Returns the user data of each role as Terraform renders it with a mocked provider: a failing assertion shows it.

    `variables` are lines of HCL, such as 'size = "paper"'.
    """
    copy = copy_of_terraform(folder)
    for test in (copy / "tests").glob("*.tftest.hcl"):
        test.unlink()
    lines = "\n".join(
        f"  {line}" for line in (f'commit = "{COMMIT}"', 'alarm_email = "someone@example.org"', *variables)
    )
    (copy / "tests/render.tftest.hcl").write_text(
        'mock_provider "aws" {\n  source = "./tests/mocks"\n}\n'
        f"variables {{\n{lines}\n}}\n"
        'run "render" {\n  assert {\n    condition     = length(output.user_data) == 0\n'
        '    error_message = "RENDERED ${base64encode(jsonencode(output.user_data))} END"\n  }\n}\n'
    )
    terraform = Terraform(copy)
    terraform.init()
    said = terraform.run("test", "-json", "-filter=tests/render.tftest.hcl", codes=(1,))
    found = re.search(r"RENDERED ([A-Za-z0-9+/=]+) END", said)
    assert found, said
    rendered: dict[str, str] = json.loads(base64.b64decode(found[1]))
    return rendered


def _mirror() -> str:
    """Returns a CLI configuration that finds the provider on this machine, or leaves it to the registry."""
    for pattern in PROVIDER_FOLDERS:
        for folder in sorted(Path("/").glob(f"{pattern.lstrip('/')}/registry.terraform.io")):
            return f'provider_installation {{\n  filesystem_mirror {{\n    path = "{folder.parent}"\n  }}\n}}\n'
    return ""


@contextmanager
def moto_server(folder: Path, address: str = "127.0.0.1") -> Iterator[str]:
    """Starts moto on this machine; yields its URL."""
    with socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
    url = f"http://{address}:{port}"
    with open(folder / "moto.log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", address, "-p", str(port)],
            stdout=log,
            stderr=log,
            env={**os.environ, "MOTO_IAM_LOAD_MANAGED_POLICIES": "false"},
        )
    try:
        wait_until(lambda: _answers(url), 60)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/moto-api/", timeout=5):
            return True
    except OSError:
        return False


def aws(url: str, service: str, region: str = REGION) -> Any:
    """Returns a client of moto."""
    import boto3  # not at the top: plain `make test` does without

    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    return boto3.client(service, endpoint_url=url, region_name=region, **keys)


def aim_at_moto(folder: Path, url: str) -> None:
    """Makes the real provider use moto instead of AWS, by an override file; the configuration is unchanged.

    moto forgets the descriptions of security groups' rules, a group's maintenance policy and, once a group is updated,
    its mix of instance types. It adds empty parts to a scaling policy, and takes a launch template's own tags for those
    of what is launched. A plan ignores these. It knows the quotas of VPC alone.
    """
    (folder / "quotas.tf").unlink()
    forgotten = "\n".join((
        *(_ignoring(f"aws_vpc_security_group_{way}_rule", name, "description") for way, name in RULES),
        _ignoring("aws_launch_template", "role", "tag_specifications"),
        _ignoring(
            "aws_autoscaling_group", "role", "instance_maintenance_policy, mixed_instances_policy, launch_template"
        ),
        _ignoring("aws_autoscaling_policy", "end", "enabled, predictive_scaling_configuration"),
    ))  # fmt: skip
    endpoints = "\n".join(f'    {service} = "{url}"' for service in SERVICES)
    (folder / "moto_override.tf").write_text(
        f"""provider "aws" {{
  region                      = var.region
  access_key                  = "testing"
  secret_key                  = "testing"
  max_retries                 = 1
  s3_use_path_style           = true
  skip_credentials_validation = true
  skip_metadata_api_check     = true

  default_tags {{
    tags = merge({{ Project = "apex-jax", Fleet = var.name }}, var.tags)
  }}

  endpoints {{
{endpoints}
  }}
}}

{forgotten}
"""
    )


def _ignoring(kind: str, name: str, argument: str) -> str:
    return f'resource "{kind}" "{name}" {{\n  lifecycle {{\n    ignore_changes = [{argument}]\n  }}\n}}\n'


def make_images(url: str, region: str = REGION, commit: str = COMMIT) -> dict[str, str]:
    """Makes the two images of a commit, as deploy/packer would; returns their ids by kind."""
    ec2, ids = aws(url, "ec2", region), {}
    for kind in ("cpu", "gpu"):
        made = ec2.register_image(Name=f"apex-jax-{kind}-{commit[:12]}-20261121-000000", RootDeviceName="/dev/sda1")
        ids[kind] = made["ImageId"]
        tags = {"Commit": commit, "Project": "apex-jax"}
        ec2.create_tags(Resources=[ids[kind]], Tags=[{"Key": key, "Value": value} for key, value in tags.items()])
    return ids
