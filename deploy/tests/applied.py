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

from deploy.tests.tools import COMMIT, CREDENTIALS, Terraform, aim_at_moto, aws, copy_of_terraform, make_images
from tests.rigs.processes import ROOT

NAME = "apex-test"
# moto has no instance refresh, and a budget fails in it: deploy/README.md lists what is not shown here.
VARIABLES = [f"-var=name={NAME}", f"-var=commit={COMMIT}", "-var=alarm_email=someone@example.org"]


class Fleet:
    """The configuration, applied to a moto server."""

    def __init__(self, folder: Path, url: str):
        self.url = url
        self.images = make_images(url)
        copy = copy_of_terraform(folder)
        aim_at_moto(copy, url)
        self.terraform = Terraform(copy)
        self.terraform.init()
        self.said: list[str] = []  # by the newest apply or destroy

    def apply(self, *variables: str) -> None:
        before = self.groups()
        self._change("apply", *variables)
        for role, group in self.groups().items():  # moto forgets the mix of a group that is updated; AWS keeps it
            if "MixedInstancesPolicy" not in group and role in before:
                mix = before[role]["MixedInstancesPolicy"]
                mix["LaunchTemplate"]["LaunchTemplateSpecification"].pop("LaunchTemplateName")  # it has the id, too
                aws(self.url, "autoscaling").update_auto_scaling_group(
                    AutoScalingGroupName=group["AutoScalingGroupName"], MixedInstancesPolicy=mix
                )

    def destroy(self, *variables: str, codes: tuple[int, ...] = (0,)) -> None:
        self._change("destroy", *variables, codes=codes)

    def _change(self, action: str, *variables: str, codes: tuple[int, ...] = (0,)) -> None:
        arguments = ("-auto-approve", "-input=false", "-no-color", *VARIABLES, *variables)
        self.said = self.terraform.run(action, *arguments, seconds=900, codes=codes).splitlines()

    def times(self, resources: str, event: str) -> list[int]:
        """Returns when, in the newest apply or destroy, the event befell each of the resources."""
        return [time for time, line in enumerate(self.said) if re.match(rf"{resources}\S*: {event}", line)]

    def plan(self, *variables: str) -> str:
        """Returns the plan; empty if there are no changes."""
        codes = (0, 2)
        said = self.terraform.run(
            "plan", "-detailed-exitcode", "-input=false", "-no-color", *VARIABLES, *variables, codes=codes
        )
        return "" if "No changes." in said else said.partition("Terraform will perform")[2]

    def output(self, name: str) -> Any:
        return json.loads(self.terraform.run("output", "-json", name))

    def command(self, name: str) -> str:
        """Returns one of the commands that the outputs show."""
        return str(self.output("commands")[name])

    def do(self, command: str, folder: Path = ROOT) -> tuple[int, str]:
        """Runs a command as a person would paste it, in a folder that has main.py; returns exit code and output."""
        if not shutil.which("aws"):
            pytest.skip("the AWS CLI is not installed here")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": self.url, "PATH": path}
        done = subprocess.run(
            ["bash", "-c", command], env=environment, cwd=folder, timeout=100,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def key(self) -> Any:
        """Returns what KMS knows of the fleet's key."""
        kms = aws(self.url, "kms")
        every = (kms.describe_key(KeyId=one["KeyId"])["KeyMetadata"] for one in kms.list_keys()["Keys"])
        (key,) = (one for one in every if one["Description"].endswith(NAME))
        return key

    def bucket(self) -> str:
        """Returns the name of the only bucket."""
        (bucket,) = (one["Name"] for one in aws(self.url, "s3").list_buckets()["Buckets"])
        return str(bucket)

    def groups(self) -> dict[str, Any]:
        """Returns the Auto Scaling groups by role."""
        found = aws(self.url, "autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
        return {group["AutoScalingGroupName"].removeprefix(f"{NAME}-"): group for group in found}

    def template(self, role: str) -> Any:
        """Returns the newest launch template of a role."""
        ec2 = aws(self.url, "ec2")
        versions = ec2.describe_launch_template_versions(LaunchTemplateName=f"{NAME}-{role}", Versions=["$Latest"])
        return versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]

    def policy(self, role: str) -> list[Any]:
        """Returns the statements of a role's policy."""
        iam = aws(self.url, "iam")
        document = iam.get_role_policy(RoleName=f"{NAME}-us-east-1-{role}", PolicyName="fleet")["PolicyDocument"]
        return list(document["Statement"])
