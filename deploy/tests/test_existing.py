"""A fleet of two replay hosts in an existing VPC with an existing bucket, on moto with the real provider; both stay."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from deploy.tests.applied import VARIABLES, Fleet
from deploy.tests.tools import REGION, aws, moto_server

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

BUCKET, FOREIGN_BUCKET = "my-results", "far-results"
CHECKPOINT = "runs/run-1/learner/checkpoints/200/state"


class Given(NamedTuple):
    """The existing network and buckets."""

    vpc_id: str
    subnet_ids: list[str]
    group_id: str  # of the endpoints that the VPC has

    @property
    def variables(self) -> tuple[str, ...]:
        subnets = ", ".join(f'"{one}"' for one in self.subnet_ids)
        return (
            f"-var=vpc_id={self.vpc_id}",
            f"-var=subnet_ids=[{subnets}]",
            f"-var=endpoints_security_group_id={self.group_id}",
        )


class Applied(NamedTuple):
    """The fleet and its existing network."""

    fleet: Fleet
    given: Given
    before: Any  # state of what was given

    def ec2(self) -> Any:
        return aws(self.fleet.url, "ec2")

    def variables(self, bucket: str = BUCKET) -> tuple[str, ...]:
        return (*self.given.variables, f"-var=bucket={bucket}")


def state(url: str, given: Given) -> Any:
    """Returns VPC, subnets, security groups, and what is in the bucket, as AWS describes them."""
    ec2, s3 = aws(url, "ec2"), aws(url, "s3")
    of_vpc = [{"Name": "vpc-id", "Values": [given.vpc_id]}]
    subnets = ec2.describe_subnets(SubnetIds=given.subnet_ids)["Subnets"]
    for subnet in subnets:
        del subnet["AvailableIpAddressCount"]  # hosts have some
    return (
        ec2.describe_vpcs(VpcIds=[given.vpc_id])["Vpcs"],
        subnets,
        ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"],
        [one["Key"] for one in s3.list_objects_v2(Bucket=BUCKET)["Contents"]],
    )


def make(url: str) -> Given:
    """Makes a VPC with two subnets, and two buckets, of which one is in another region."""
    ec2 = aws(url, "ec2")
    vpc_id = ec2.create_vpc(CidrBlock="10.90.0.0/16")["Vpc"]["VpcId"]
    for option in ("EnableDnsSupport", "EnableDnsHostnames"):
        ec2.modify_vpc_attribute(VpcId=vpc_id, **{option: {"Value": True}})
    subnet_ids = [
        ec2.create_subnet(VpcId=vpc_id, CidrBlock=f"10.90.{number}.0/24", AvailabilityZone=f"{REGION}{zone}")["Subnet"][
            "SubnetId"
        ]
        for number, zone in enumerate("ab")
    ]
    group_id = ec2.create_security_group(GroupName="endpoints", Description="of endpoints", VpcId=vpc_id)["GroupId"]
    s3 = aws(url, "s3")
    s3.create_bucket(Bucket=BUCKET)
    s3.put_object(Bucket=BUCKET, Key=CHECKPOINT, Body=b"of a run before")
    s3.create_bucket(Bucket=FOREIGN_BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    return Given(vpc_id, subnet_ids, group_id)


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Applied]:
    folder = tmp_path_factory.mktemp("existing")
    with moto_server(folder) as url:
        given = make(url)
        applied = Applied(Fleet(folder, url), given, state(url, given))
        applied.fleet.apply(*applied.variables())
        yield applied


def test_hosts_are_in_the_given_subnets(applied: Applied) -> None:
    zones = {role: {*group["VPCZoneIdentifier"].split(",")} for role, group in applied.fleet.groups().items()}
    assert zones.keys() == {"replay", "learner", "actor", "evaluator"}
    assert zones["actor"] == {*applied.given.subnet_ids}
    assert zones["replay"] == zones["learner"] == {applied.given.subnet_ids[0]}


def test_roles_reach_the_endpoints_that_the_vpc_has_and_no_others_are_made(applied: Applied) -> None:
    assert applied.ec2().describe_vpc_endpoints()["VpcEndpoints"] == []
    groups = applied.ec2().describe_security_groups(GroupIds=[applied.given.group_id])["SecurityGroups"]
    admitted = [(one["FromPort"], one["ToPort"], len(one["UserIdGroupPairs"])) for one in groups[0]["IpPermissions"]]
    assert admitted == [(443, 443, 4)]


def test_run_goes_into_the_given_bucket_and_no_other_is_made(applied: Applied) -> None:
    assert applied.fleet.output("run_url") == f"s3://{BUCKET}/runs/run-1"
    buckets = {one["Name"] for one in aws(applied.fleet.url, "s3").list_buckets()["Buckets"]}
    assert buckets == {BUCKET, FOREIGN_BUCKET}
    for role in ("replay", "learner"):
        assert f"arn:aws:s3:::{BUCKET}/" in str(applied.fleet.policy(role))


def test_the_replay_host_has_a_name_and_a_folder(applied: Applied) -> None:
    discovery = aws(applied.fleet.url, "servicediscovery")
    services = {one["Id"]: one["Name"] for one in discovery.list_services()["Services"]}
    assert {*services.values()} == {"replay", "learner"}
    user_data = base64.b64decode(applied.fleet.template("replay")["UserData"]).decode()
    (service,) = re.findall(r'APEX_JAX_SERVICE_ID="(.+)"', user_data)
    assert services[service] == "replay"
    assert f"arn:aws:s3:::{BUCKET}/runs/run-1/replay/*" in str(applied.fleet.policy("replay"))


def test_bucket_of_another_region_is_refused_before_anything_is_made(applied: Applied) -> None:
    variables = (*VARIABLES, *applied.variables(FOREIGN_BUCKET))
    said = applied.fleet.terraform.run("plan", "-input=false", "-no-color", *variables, codes=(1,))
    assert f"bucket: {FOREIGN_BUCKET} is in eu-west-1" in " ".join(said.split())


def test_a_second_plan_has_nothing_to_change(applied: Applied) -> None:
    assert applied.fleet.plan(*applied.variables()) == ""


def test_destroy_leaves_existing_resources_unchanged(applied: Applied) -> None:
    applied.fleet.destroy(*applied.variables(), "-var=delete_results=true")
    assert state(applied.fleet.url, applied.given) == applied.before
    assert applied.fleet.groups() == {}
