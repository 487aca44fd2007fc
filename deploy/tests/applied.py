"""The Terraform configuration applied to a moto server, for tests of its resources and commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.tests.tools import COMMIT, REGION, Terraform, aim_at_moto, aws, copy_of_terraform, make_images
from tests.rigs.processes import ROOT

NAME = "apex-test"
VARIABLES = f'name = "{NAME}"\ncommit = "{COMMIT}"\nalarm_email = "someone@example.org"\n'


class Fleet:
    """The configuration, applied to a moto server, which has no instance refresh."""

    def __init__(self, folder: Path, url: str, region: str = REGION):
        self.url, self.region = url, region
        self.images = make_images(url, region)
        copy = copy_of_terraform(folder)
        aim_at_moto(copy, url)
        (copy / "fleet.auto.tfvars").write_text(f'{VARIABLES}region = "{region}"\n')
        self.terraform = Terraform(copy)
        self.terraform.init()
        self.said: list[str] = []  # by the newest apply or destroy

    def aws(self, service: str) -> Any:
        """Returns a client of moto in the fleet's region."""
        return aws(self.url, service, self.region)

    def apply(self, *variables: str) -> None:
        self._change("apply", *variables)

    def paste(self, name: str) -> None:
        """Runs one of the commands that change the fleet, as the outputs show it: without any option of its own."""
        code, said = self.do(self.command(name), seconds=900)
        assert code == 0, said
        self.said = said.splitlines()

    def destroy(self, *variables: str, codes: tuple[int, ...] = (0,)) -> None:
        self._change("destroy", *variables, codes=codes)

    def _change(self, action: str, *variables: str, codes: tuple[int, ...] = (0,)) -> None:
        arguments = ("-auto-approve", "-input=false", "-no-color", *variables)
        self.said = self.terraform.run(action, *arguments, seconds=900, codes=codes).splitlines()

    def times(self, resources: str, event: str) -> list[int]:
        """Returns when, in the newest apply or destroy, the event befell each of the resources."""
        return [time for time, line in enumerate(self.said) if re.match(rf"{resources}\S*: {event}", line)]

    def plan(self, *variables: str, codes: tuple[int, ...] = (0, 2)) -> str:
        """Returns the plan; empty if there are no changes; with the exit code 1, the errors."""
        arguments = ("-detailed-exitcode", "-input=false", "-no-color", *variables)
        said = self.terraform.run("plan", *arguments, codes=codes)
        if 1 in codes:
            return said
        return "" if "No changes." in said else said.partition("Terraform will perform")[2]

    def output(self, name: str) -> Any:
        return json.loads(self.terraform.run("output", "-json", name))

    def command(self, name: str) -> str:
        """Returns one of the commands that the outputs show."""
        return str(self.output("commands")[name])

    def do(self, command: str, folder: Path = ROOT, seconds: float = 100) -> tuple[int, str]:
        """Runs a command as a person would paste it, in a folder that has main.py; returns exit code and output."""
        if not shutil.which("aws"):
            pytest.skip("the AWS CLI is not installed here")
        environment = {
            **self.terraform.environment,
            "AWS_ENDPOINT_URL": self.url,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **{f"TF_CLI_ARGS_{name}": "-auto-approve -input=false -no-color" for name in ("apply", "destroy")},
        }
        done = subprocess.run(
            ["bash", "-c", command.replace("=deploy/terraform", f"={self.terraform.folder}")],
            env=environment, cwd=folder, timeout=seconds,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def key(self) -> Any:
        """Returns what KMS knows of the fleet's key."""
        kms = self.aws("kms")
        every = (kms.describe_key(KeyId=one["KeyId"])["KeyMetadata"] for one in kms.list_keys()["Keys"])
        (key,) = (one for one in every if one["Description"].endswith(NAME))
        return key

    def bucket(self) -> str:
        """Returns the name of the only bucket."""
        (bucket,) = (one["Name"] for one in self.aws("s3").list_buckets()["Buckets"])
        return str(bucket)

    def groups(self) -> dict[str, Any]:
        """Returns the Auto Scaling groups by role."""
        found = self.aws("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
        return {group["AutoScalingGroupName"].removeprefix(f"{NAME}-"): group for group in found}

    def hosts(self) -> dict[str, int]:
        """Returns the number of hosts by role."""
        return {role: len(group["Instances"]) for role, group in self.groups().items()}

    def template(self, role: str) -> Any:
        """Returns the newest launch template of a role."""
        ec2 = self.aws("ec2")
        versions = ec2.describe_launch_template_versions(LaunchTemplateName=f"{NAME}-{role}", Versions=["$Latest"])
        return versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]

    def policy(self, role: str) -> list[Any]:
        """Returns the statements of a role's policy."""
        iam = self.aws("iam")
        document = iam.get_role_policy(RoleName=f"{NAME}-{self.region}-{role}", PolicyName="fleet")["PolicyDocument"]
        return list(document["Statement"])
