"""A whole life of a fleet, on moto with the real provider: up, more actors, nothing to change, stopped, gone."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy_tools import (
    COMMIT,
    CREDENTIALS,
    Terraform,
    aim_at_moto,
    aws,
    copy_of_terraform,
    make_images,
    moto_server,
)

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1500)]

NAME = "apex-test"
ROLES = ("replay", "learner", "actor", "evaluator")
# moto has no instance refresh, and a budget fails in it: docs/deploy.md lists what is not shown here.
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

    def destroy(self, *variables: str) -> None:
        self._change("destroy", *variables)

    def _change(self, action: str, *variables: str) -> None:
        arguments = ("-auto-approve", "-input=false", "-no-color", *VARIABLES, *variables)
        self.said = self.terraform.run(action, *arguments, seconds=900).splitlines()

    def times(self, resources: str, event: str) -> list[int]:
        """Returns when, in the newest apply or destroy, the event befell each of the resources."""
        return [time for time, line in enumerate(self.said) if re.match(rf"{resources}\S*: {event}", line)]

    def plan(self, *variables: str) -> str:
        """Returns the plan; empty where there is nothing to change."""
        codes = (0, 2)
        said = self.terraform.run(
            "plan", "-detailed-exitcode", "-input=false", "-no-color", *VARIABLES, *variables, codes=codes
        )
        return "" if "No changes." in said else said.partition("Terraform will perform")[2]

    def output(self, name: str) -> Any:
        return json.loads(self.terraform.run("output", "-json", name))

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


GROUPS = r"module\.\w+(\[0\])?\.aws_autoscaling_group\.role"
NEEDS = (  # of a host
    r"aws_(iam_role_policy\.role|vpc_endpoint\.|route_table_association\.private|"
    r"vpc_security_group_\w+_rule\.(endpoints|link|s3))"
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with moto_server(folder) as url:
        fleet = Fleet(folder, url)
        fleet.apply()
        yield fleet


def listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def test_every_role_has_its_hosts(fleet: Fleet) -> None:
    groups = fleet.groups()
    hosts = {role: len(group["Instances"]) for role, group in groups.items()}
    assert hosts == {"replay": 1, "learner": 1, "actor": 2, "evaluator": 1}
    assert {role: (group["MinSize"], group["MaxSize"]) for role, group in groups.items()}["learner"] == (1, 1)


def test_hosts_boot_when_what_they_need_is_there(fleet: Fleet) -> None:
    """An agent that finds no endpoint, or no policy, sleeps for half an hour."""
    needs, groups = fleet.times(NEEDS, "Creation complete"), fleet.times(GROUPS, "Creating")
    assert len(groups) == len(ROLES)
    assert len(needs) > 20
    assert max(needs) < min(groups)


def test_images_are_those_of_the_commit(fleet: Fleet) -> None:
    assert {role: fleet.template(role)["ImageId"] for role in ROLES} == {
        "replay": fleet.images["cpu"],
        "learner": fleet.images["gpu"],
        "actor": fleet.images["cpu"],
        "evaluator": fleet.images["cpu"],
    }


@pytest.mark.parametrize("role", ROLES)
def test_host_has_imdsv2_an_encrypted_disk_and_no_public_address(fleet: Fleet, role: str) -> None:
    template = fleet.template(role)
    assert template["MetadataOptions"]["HttpTokens"] == "required"
    assert template["BlockDeviceMappings"][0]["Ebs"]["Encrypted"] is True
    assert template["NetworkInterfaces"][0]["AssociatePublicIpAddress"] is False


def test_user_data_fits_and_is_what_the_output_shows(fleet: Fleet) -> None:
    shown = fleet.output("user_data")
    for role in ROLES:
        data = base64.b64decode(fleet.template(role)["UserData"]).decode()
        assert data == shown[role]
        assert len(data) < 16384
        assert data.startswith("#cloud-config\n")


def test_nobody_outside_gets_in_and_inside_only_whom_the_links_need(fleet: Fleet) -> None:
    ec2 = aws(fleet.url, "ec2")
    groups = {group["GroupId"]: group for group in ec2.describe_security_groups()["SecurityGroups"]}
    names = {identity: group["GroupName"].removeprefix(f"{NAME}-") for identity, group in groups.items()}
    ours = {identity for identity, group in groups.items() if group["GroupName"].startswith(NAME)}
    links = set()
    for identity in ours:
        for rule in groups[identity]["IpPermissions"]:
            assert not rule["IpRanges"]
            assert not rule["Ipv6Ranges"]
            assert rule["FromPort"] == rule["ToPort"]
            links |= {(names[pair["GroupId"]], names[identity], rule["FromPort"]) for pair in rule["UserIdGroupPairs"]}
        for rule in groups[identity]["IpPermissionsEgress"]:
            assert not rule["IpRanges"], f"{names[identity]} may talk to {rule}"
    assert links == {
        ("actor", "replay", 5550),
        ("learner", "replay", 5551),
        ("actor", "learner", 5552),
        ("evaluator", "learner", 5552),
        *((role, "endpoints", 443) for role in ROLES),
    }


def test_there_is_no_way_to_the_internet(fleet: Fleet) -> None:
    ec2 = aws(fleet.url, "ec2")
    assert ec2.describe_internet_gateways()["InternetGateways"] == []
    assert ec2.describe_nat_gateways()["NatGateways"] == []
    services = {one["ServiceName"].split(".")[-1] for one in ec2.describe_vpc_endpoints()["VpcEndpoints"]}
    assert services == {"logs", "monitoring", "servicediscovery", "ssm", "ssmmessages", "s3"}


@pytest.mark.parametrize("role", ROLES)
def test_role_reads_its_own_secret_key_and_no_other(fleet: Fleet, role: str) -> None:
    keys = [
        name
        for one in fleet.policy(role)
        if "ssm:GetParameter" in listed(one["Action"])
        for name in listed(one["Resource"])
    ]
    secrets = [name for name in keys if name.endswith(".secret")]
    assert [name.rsplit("/", 1)[1] for name in secrets] == [f"{role}.secret"]
    assert all(f":parameter/apex-jax/{NAME}/keys/" in name for name in keys)
    assert not any("*" in name for name in keys)


def test_only_who_stores_may_store_and_only_in_the_run(fleet: Fleet) -> None:
    for role in ROLES:
        stores = [one for one in fleet.policy(role) if "s3:PutObject" in listed(one["Action"])]
        folders = {name.split("/runs/run-1/")[1] for one in stores for name in listed(one["Resource"])}
        own = {"replay": {"replay/*"}, "learner": {"learner/*"}}.get(role, set())
        assert folders == (set() if role == "actor" else own | {"results/*"})


@pytest.mark.parametrize("role", ROLES)
def test_no_action_is_a_wildcard_and_few_know_no_resource(fleet: Fleet, role: str) -> None:
    for one in fleet.policy(role):
        assert not any("*" in action for action in listed(one["Action"]))
        if "*" in listed(one["Resource"]):
            assert one["Sid"] in ("SessionManager", "Health", "NameLookup")


def test_only_replay_and_learner_can_take_their_names(fleet: Fleet) -> None:
    services = {one["Name"]: one["Arn"] for one in aws(fleet.url, "servicediscovery").list_services()["Services"]}
    for role in ROLES:
        named = [one for one in fleet.policy(role) if "servicediscovery:RegisterInstance" in listed(one["Action"])]
        assert [listed(one["Resource"]) for one in named] == ([[services[role]]] if role in services else [])


def test_bucket_is_private_encrypted_versioned_and_tls_only(fleet: Fleet) -> None:
    s3 = aws(fleet.url, "s3")
    (bucket,) = [one["Name"] for one in s3.list_buckets()["Buckets"]]
    assert all(s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"].values())
    assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
    (rule,) = s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "aws:kms"
    (statement,) = json.loads(s3.get_bucket_policy(Bucket=bucket)["Policy"])["Statement"]
    assert (statement["Effect"], statement["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})
    rules = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert {one["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] for one in rules} == {1}
    days = {one["Filter"]["Prefix"]: one["NoncurrentVersionExpiration"]["NoncurrentDays"] for one in rules}
    assert days == {"": 7, "runs/run-1/replay/": 1, "runs/run-1/results/": 1}


def test_logs_are_kept_as_long_as_said(fleet: Fleet) -> None:
    groups = aws(fleet.url, "logs").describe_log_groups(logGroupNamePrefix=f"/apex-jax/{NAME}/")["logGroups"]
    assert {group["logGroupName"].rsplit("/", 1)[1] for group in groups} == {*ROLES, "rejected-traffic"}
    assert all(group["retentionInDays"] == 30 and group["kmsKeyId"] for group in groups)


def test_alarms_reach_a_person(fleet: Fleet) -> None:
    alarms = aws(fleet.url, "cloudwatch").describe_alarms()["MetricAlarms"]
    names = {alarm["AlarmName"].removeprefix(f"{NAME}-") for alarm in alarms}
    assert names == {
        "learner-stopped",
        "replay-stopped",
        "evaluator-stopped",
        "actors-failing",
        "replay-memory",
        "replay-disk",
        "learner-disk",
        "actors-missing",
    }
    subscriptions = aws(fleet.url, "sns").list_subscriptions()["Subscriptions"]
    assert {topic for alarm in alarms for topic in alarm["AlarmActions"]} == {one["TopicArn"] for one in subscriptions}


def test_state_holds_no_key(fleet: Fleet) -> None:
    state = fleet.terraform.run("state", "pull")
    assert "PRIVATE KEY" not in state
    assert '"type": "aws_ssm_parameter"' not in state


# From here on the fleet changes, in this order.


def test_a_second_plan_has_nothing_to_change(fleet: Fleet) -> None:
    assert fleet.plan() == ""


def test_the_number_of_actors_changes_by_one_variable_and_nothing_else_does(fleet: Fleet) -> None:
    before = {role: {one["InstanceId"] for one in group["Instances"]} for role, group in fleet.groups().items()}
    fleet.apply("-var=actor_hosts=5")
    after = {role: {one["InstanceId"] for one in group["Instances"]} for role, group in fleet.groups().items()}
    assert len(after["actor"]) == 5
    assert before["actor"] < after["actor"]  # those that were there have gone on
    assert {role: after[role] for role in after if role != "actor"} == {
        role: before[role] for role in before if role != "actor"
    }
    assert fleet.plan("-var=actor_hosts=5") == ""


def test_stopping_leaves_the_bucket_and_no_instance(fleet: Fleet) -> None:
    s3 = aws(fleet.url, "s3")
    (bucket,) = [one["Name"] for one in s3.list_buckets()["Buckets"]]
    s3.delete_bucket_policy(Bucket=bucket)  # moto denies by it whatever its condition says
    s3.put_object(Bucket=bucket, Key="runs/run-1/learner/manifest.json", Body=b"learned")
    fleet.apply("-var=running=false", "-var=delete_results=true")
    groups, endpoints = fleet.times(GROUPS, "Modifications complete"), fleet.times("aws_vpc_endpoint", "Destroying")
    assert len(groups) == len(ROLES)
    assert len(endpoints) == 5
    assert max(groups) < min(endpoints)  # which still carry the hosts' last lines of log
    assert all(group["Instances"] == [] for group in fleet.groups().values())
    s3.delete_bucket_policy(Bucket=bucket)
    assert s3.get_object(Bucket=bucket, Key="runs/run-1/learner/manifest.json")["Body"].read() == b"learned"
    services = {
        one["ServiceName"].split(".")[-1]
        for one in aws(fleet.url, "ec2").describe_vpc_endpoints()["VpcEndpoints"]
        if one["State"] != "deleted"
    }
    assert services == {"s3"}


def test_wait_ends_when_no_host_is_left(fleet: Fleet) -> None:
    if not shutil.which("aws"):
        pytest.skip("the AWS CLI is not installed here")
    environment = {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": fleet.url}
    command = fleet.output("commands")["wait"]
    assert subprocess.run(["bash", "-c", command], env=environment, timeout=60).returncode == 0
    ec2 = aws(fleet.url, "ec2")
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "Fleet", "Value": NAME}]}]
    (host,) = ec2.run_instances(ImageId=fleet.images["cpu"], MinCount=1, MaxCount=1, TagSpecifications=tags)[
        "Instances"
    ]
    waiting = command.replace("sleep 10", "exit 7")
    assert subprocess.run(["bash", "-c", waiting], env=environment, timeout=60).returncode == 7
    ec2.terminate_instances(InstanceIds=[host["InstanceId"]])


def test_destroy_leaves_nothing(fleet: Fleet) -> None:
    discovery = aws(fleet.url, "servicediscovery")
    for service in discovery.list_services()["Services"]:  # as hosts do at boot
        discovery.register_instance(
            ServiceId=service["Id"], InstanceId=service["Name"], Attributes={"AWS_INSTANCE_IPV4": "10.83.0.9"}
        )
    fleet.destroy("-var=delete_results=true")
    assert max(fleet.times(GROUPS, "Destruction complete")) < min(fleet.times(NEEDS, "Destroying"))
    ec2 = aws(fleet.url, "ec2")
    assert fleet.groups() == {}
    assert aws(fleet.url, "s3").list_buckets()["Buckets"] == []
    assert discovery.list_services()["Services"] == []
    assert discovery.list_namespaces()["Namespaces"] == []
    assert [one for one in aws(fleet.url, "iam").list_roles()["Roles"] if one["RoleName"].startswith(NAME)] == []
    assert aws(fleet.url, "logs").describe_log_groups()["logGroups"] == []
    assert aws(fleet.url, "cloudwatch").describe_alarms()["MetricAlarms"] == []
    assert aws(fleet.url, "sns").list_topics()["Topics"] == []
    assert [vpc for vpc in ec2.describe_vpcs()["Vpcs"] if not vpc["IsDefault"]] == []
    assert ec2.describe_launch_templates()["LaunchTemplates"] == []
    states = {
        instance["State"]["Name"] for one in ec2.describe_instances()["Reservations"] for instance in one["Instances"]
    }
    assert states <= {"terminated"}
    keys = aws(fleet.url, "kms")
    ours = [keys.describe_key(KeyId=key["KeyId"])["KeyMetadata"] for key in keys.list_keys()["Keys"]]
    assert {key["KeyState"] for key in ours if key["Description"].endswith(NAME)} == {"PendingDeletion"}
