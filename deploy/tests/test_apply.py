"""The whole life of a fleet, on moto with the real provider: apply, more actors, no changes, stop, destroy.

And that of the other preset, with a bucket that it did not make.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.host.results import BY_EVERY_ROLE, BY_ROLE
from deploy.tests.applied import NAME, Fleet
from deploy.tests.tools import moto_server
from tests.rigs.processes import ROOT
from tests.rigs.storages import content, run_in

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1500)]

ROLES = ("replay", "learner", "actor", "evaluator")
ACCOUNT = "123456789012"  # moto's
REGION = "eu-west-1"  # of the fleet, given on the command line of its first apply
FILM = "runs/run-1/results/video.mp4"
GROUPS = r"aws_autoscaling_group\.role"
NEEDS = (  # of a host
    r"aws_(iam_role_policy\.role|vpc_endpoint\.|route_table_association\.private|"
    r"vpc_security_group_\w+_rule\.(link|s3))"
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with moto_server(folder) as url:
        fleet = Fleet(folder, url, REGION)
        fleet.apply()
        yield fleet


def listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def allowing(fleet: Fleet, role: str, action: str) -> list[Any]:
    """Returns the statements of a role's policy that allow an action."""
    return [one for one in fleet.policy(role) if action in listed(one["Action"])]


def resources(fleet: Fleet, role: str, action: str) -> list[str]:
    return [name for one in allowing(fleet, role, action) for name in listed(one["Resource"])]


def services(fleet: Fleet) -> set[str]:
    """Returns the services that have an endpoint."""
    endpoints = fleet.aws("ec2").describe_vpc_endpoints()["VpcEndpoints"]
    return {one["ServiceName"].split(".")[-1] for one in endpoints if one["State"] != "deleted"}


def own_vpcs(fleet: Fleet) -> list[Any]:
    return [vpc for vpc in fleet.aws("ec2").describe_vpcs()["Vpcs"] if not vpc["IsDefault"]]


def test_every_role_has_its_hosts_with_the_image_of_the_commit(fleet: Fleet) -> None:
    assert fleet.hosts() == {"replay": 1, "learner": 1, "actor": 2, "evaluator": 1}
    images = {role: fleet.template(role)["ImageId"] for role in ROLES}
    assert images == {role: fleet.images["gpu" if role == "learner" else "cpu"] for role in ROLES}


def test_hosts_boot_after_the_resources_that_they_need(fleet: Fleet) -> None:
    """An agent that finds no endpoint, or no policy, sleeps for half an hour."""
    needs, groups = fleet.times(NEEDS, "Creation complete"), fleet.times(GROUPS, "Creating")
    assert len(groups) == len(ROLES)
    assert len(needs) > 20
    assert max(needs) < min(groups)


def test_security_groups_admit_only_the_peers_of_each_link_and_there_is_no_way_to_the_internet(fleet: Fleet) -> None:
    ec2 = fleet.aws("ec2")
    groups = {group["GroupId"]: group for group in ec2.describe_security_groups()["SecurityGroups"]}
    names = {identity: group["GroupName"].removeprefix(f"{NAME}-") for identity, group in groups.items()}
    links = set()
    for identity in (one for one, group in groups.items() if group["GroupName"].startswith(NAME)):
        for rule in groups[identity]["IpPermissions"]:
            assert not rule["IpRanges"] + rule["Ipv6Ranges"]
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
    assert ec2.describe_internet_gateways()["InternetGateways"] == []
    assert ec2.describe_nat_gateways()["NatGateways"] == []
    assert services(fleet) == {"logs", "monitoring", "servicediscovery", "ssm", "ssmmessages", "s3"}


@pytest.mark.parametrize("role", ROLES)
def test_role_reads_its_own_secret_key_and_no_other(fleet: Fleet, role: str) -> None:
    keys = resources(fleet, role, "ssm:GetParameter")
    assert [name.partition(f":parameter/apex-jax/{NAME}/keys/")[2] for name in keys] == [f"{role}.secret", "*.public"]


@pytest.mark.parametrize("role", ROLES)
def test_role_stores_its_own_state_and_results_and_deletes_of_its_state_alone(fleet: Fleet, role: str) -> None:
    def places(action: str) -> set[str]:
        return {name.split(f"{fleet.bucket()}/runs/run-1/")[1] for name in resources(fleet, role, action)}

    state = {f"{role}/*"} if role in ("replay", "learner") else set()
    patterns = (*BY_EVERY_ROLE, *BY_ROLE[role]) if role in BY_ROLE else ()
    written = state | {f"results/{pattern.format(role=role)}" for pattern in patterns}
    assert places("s3:PutObject") == places("s3:GetObject") == written
    for action in ("s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"):
        assert places(action) == state


@pytest.mark.parametrize("role", ROLES)
def test_policy_has_no_wildcard_action_few_wildcard_resources_and_is_short_enough(fleet: Fleet, role: str) -> None:
    """AWS takes 10,240 characters but blanks (quotas of IAM), moto 33,301."""
    for one in fleet.policy(role):
        assert not any("*" in action for action in listed(one["Action"]))
        if "*" in listed(one["Resource"]):
            assert one["Sid"] in ("SessionManager", "Health", "NameLookup")
    assert len(re.sub(r"\s", "", json.dumps(fleet.policy(role)))) < 10_240 * 2 / 3


@pytest.mark.parametrize("role", ROLES)
def test_host_reports_only_to_the_metrics_of_its_own_fleet_and_role(fleet: Fleet, role: str) -> None:
    (one,) = allowing(fleet, role, "cloudwatch:PutMetricData")
    assert one["Condition"] == {"StringEquals": {"cloudwatch:namespace": f"ApexJax/{NAME}/{role}"}}


@pytest.mark.parametrize("role", ROLES)
def test_only_replay_and_learner_can_register_host_names_and_each_only_its_own(fleet: Fleet, role: str) -> None:
    """Moto does not apply policies, so this checks the documents."""
    names = {one["Name"]: one["Arn"] for one in fleet.aws("servicediscovery").list_services()["Services"]}
    own = [names[role]] if role in names else []
    assert resources(fleet, role, "servicediscovery:RegisterInstance") == own
    key = "route53:ChangeResourceRecordSets"
    own_record = {f"{key}NormalizedRecordNames": f"{role}.{NAME}.internal", f"{key}RecordTypes": "A"}
    records = [one["Condition"]["ForAllValues:StringEquals"] for one in allowing(fleet, role, key)]
    assert records == ([own_record] if own else [])


def test_bucket_is_private_encrypted_versioned_and_tls_only(fleet: Fleet) -> None:
    assert_bucket_is_protected(fleet)


def assert_bucket_is_protected(fleet: Fleet) -> None:
    s3, bucket = fleet.aws("s3"), fleet.bucket()
    assert all(s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"].values())
    assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
    (rule,) = s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    encryption = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": fleet.key()["Arn"]}
    assert rule["ApplyServerSideEncryptionByDefault"] == encryption
    (statement,) = json.loads(s3.get_bucket_policy(Bucket=bucket)["Policy"])["Statement"]
    assert (statement["Effect"], statement["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})
    (rule,) = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert rule["NoncurrentVersionExpiration"] == {"NoncurrentDays": 1}


def test_endpoints_allow_this_account_the_actions_of_the_roles_and_no_other(fleet: Fleet) -> None:
    roles = {action for role in ROLES for one in fleet.policy(role) for action in listed(one["Action"])}
    for endpoint in fleet.aws("ec2").describe_vpc_endpoints()["VpcEndpoints"]:
        service = endpoint["ServiceName"].split(".")[-1]
        (one,) = json.loads(endpoint["PolicyDocument"])["Statement"]
        own_account = {"StringEquals": {"aws:PrincipalAccount": ACCOUNT}}
        assert (one["Effect"], one["Principal"], one["Condition"]) == ("Allow", {"AWS": "*"}, own_account), service
        own_bucket = {f"arn:aws:s3:::{fleet.bucket()}", f"arn:aws:s3:::{fleet.bucket()}/*"}
        assert {*listed(one["Resource"])} == (own_bucket if service == "s3" else {"*"})
        prefix = {"monitoring": "cloudwatch"}.get(service, service)
        assert {*listed(one["Action"])} == {action for action in roles if action.startswith(f"{prefix}:")}


def test_logs_are_kept_for_a_month_and_encrypted(fleet: Fleet) -> None:
    groups = fleet.aws("logs").describe_log_groups(logGroupNamePrefix=f"/apex-jax/{NAME}/")["logGroups"]
    assert {group["logGroupName"].rsplit("/", 1)[1] for group in groups} == {*ROLES}
    assert all(group["retentionInDays"] == 30 and group["kmsKeyId"] for group in groups)


def test_every_alarm_sends_mail_but_those_that_would_announce_the_end_again(fleet: Fleet) -> None:
    alarms = fleet.aws("cloudwatch").describe_alarms()["MetricAlarms"]
    names = {re.sub(r"-[0-9a-f]{8}$", "", alarm["AlarmName"].removeprefix(f"{NAME}-")): alarm for alarm in alarms}
    assert names.keys() == {
        "learner-stopped", "replay-stopped", "evaluator-stopped", "actors-failing", "actors-missing", "no-learner",
        "replay-memory", "replay-disk", "learner-disk", *(f"end-{role}" for role in ROLES),
    }  # fmt: skip
    (topic,) = (one["TopicArn"] for one in fleet.aws("sns").list_subscriptions()["Subscriptions"])
    quiet = {name for name, alarm in names.items() if topic not in alarm["AlarmActions"]}
    assert quiet == {f"end-{role}" for role in ROLES if role != "learner"}
    scaling = fleet.aws("autoscaling").describe_policies()["ScalingPolicies"]
    policies = {one["PolicyARN"]: one["PolicyName"] for one in scaling}
    ended = {policies[action] for action in names["no-learner"]["AlarmActions"] if action in policies}
    assert ended == {f"{NAME}-actor-end", f"{NAME}-evaluator-end"}


def test_printed_commands_find_the_host_of_the_learner_and_the_groups(fleet: Fleet) -> None:
    found = re.search(r"--target \$\((aws ec2 describe-instances .*)\)$", fleet.command("shell"))
    assert found
    (learner,) = fleet.groups()["learner"]["Instances"]
    assert fleet.do(found[1]) == (0, f"{learner['InstanceId']}\n")
    code, said = fleet.do(fleet.command("why"))  # moto knows of no activities
    assert code == 0
    assert {*said.splitlines()} == {f"{NAME}-{role}" for role in ROLES}


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
    assert before.pop("actor") < after.pop("actor")  # those that were there have gone on
    assert after == before
    assert fleet.plan("-var=actor_hosts=5") == ""


def test_end_of_the_run_leaves_no_instance_and_an_apply_starts_none(fleet: Fleet) -> None:
    """Moto carries out no action of an alarm: here the policies that the alarms name are executed."""
    scaling, alarms = fleet.aws("autoscaling"), fleet.aws("cloudwatch").describe_alarms()["MetricAlarms"]
    names = {one["PolicyARN"]: one["PolicyName"] for one in scaling.describe_policies()["ScalingPolicies"]}
    before = {role: group["DesiredCapacity"] for role, group in fleet.groups().items()}
    for alarm in alarms:
        if alarm.get("MetricName") == "Finished":
            role = alarm["AlarmName"].removeprefix(f"{NAME}-end-").rpartition("-")[0]
            (policy,) = (names[action] for action in alarm["AlarmActions"] if action in names)
            scaling.execute_policy(AutoScalingGroupName=f"{NAME}-{role}", PolicyName=policy)
    assert {*fleet.hosts().values()} == {0}
    fleet.apply("-var=actor_hosts=5")
    assert "The run run-1 is over, so this starts no host" in " ".join(fleet.said)
    assert {*fleet.hosts().values()} == {0}
    for more in ("-var=run=run-2", '-var=settings={"total_minutes"="600"}'):
        assert len(re.findall(r"desired_capacity += 0 -> [1-9]", fleet.plan("-var=actor_hosts=5", more))) == len(ROLES)
    for role, hosts in before.items():
        scaling.set_desired_capacity(AutoScalingGroupName=f"{NAME}-{role}", DesiredCapacity=hosts)


def test_plan_of_another_region_is_refused(fleet: Fleet) -> None:
    said = " ".join(fleet.plan("-var=region=us-east-1", codes=(1,)).split())
    assert f"This state is of the fleet {NAME} in {REGION}" in said


def test_stopping_leaves_the_bucket_and_no_instance(fleet: Fleet) -> None:
    s3, bucket = fleet.aws("s3"), fleet.bucket()
    s3.delete_bucket_policy(Bucket=bucket)  # moto denies by it whatever its condition says
    s3.put_object(Bucket=bucket, Key=FILM, Body=b"a film")
    fleet.paste("stop")
    groups, endpoints = fleet.times(GROUPS, "Modifications complete"), fleet.times("aws_vpc_endpoint", "Destroying")
    assert (len(groups), len(endpoints)) == (len(ROLES), 5)
    assert max(groups) < min(endpoints)  # but hosts end after that: their last lines of log may find no endpoint
    assert {*fleet.hosts().values()} == {0}
    s3.delete_bucket_policy(Bucket=bucket)
    assert s3.get_object(Bucket=bucket, Key=FILM)["Body"].read() == b"a film"
    assert services(fleet) == {"s3"}


def test_fetch_downloads_the_run(fleet: Fleet, tmp_path: Path) -> None:
    run = run_in(tmp_path)
    code, said = fleet.do(f"python main.py storage push {run} {fleet.output('run_url')}")
    assert code == 0, said
    home = tmp_path / "home"
    home.mkdir()
    (home / "main.py").symlink_to(ROOT / "main.py")
    code, said = fleet.do(fleet.command("fetch"), home)
    assert code == 0, said
    taken = content(home / "run-1")
    assert taken.pop("video.mp4") == b"a film"
    assert taken == {name: data for name, data in content(run).items() if name in taken}
    assert {"checkpoints/200/state/d/x", "replay/snapshot-000000000001", "metrics/learner.jsonl"} <= {*taken}


def test_wait_ends_when_no_host_is_left_and_with_an_error_if_nobody_knows(fleet: Fleet) -> None:
    wait = fleet.command("wait")
    assert fleet.do(wait) == (0, "")
    ec2 = fleet.aws("ec2")
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "Fleet", "Value": NAME}]}]
    made = ec2.run_instances(ImageId=fleet.images["cpu"], MinCount=1, MaxCount=1, TagSpecifications=tags)
    assert fleet.do(wait.replace("sleep 10", "exit 7"))[0] == 7
    ec2.terminate_instances(InstanceIds=[made["Instances"][0]["InstanceId"]])
    assert fleet.do(wait.replace("--region", "--no-such-option"))[0] not in (0, 7)


def test_images_of_other_commits_are_removed_by_a_printed_command(fleet: Fleet) -> None:
    ec2 = fleet.aws("ec2")
    old = ec2.register_image(Name="apex-jax-cpu-old", RootDeviceName="/dev/sda1")["ImageId"]
    ec2.create_tags(
        Resources=[old], Tags=[{"Key": "Commit", "Value": "0" * 40}, {"Key": "Project", "Value": "apex-jax"}]
    )
    command = fleet.command("images").replace(" --delete-associated-snapshots", "")  # which moto does not know
    code, said = fleet.do(command)
    assert code == 0, said
    assert {one["ImageId"] for one in ec2.describe_images(Owners=["self"])["Images"]} == {*fleet.images.values()}


def test_destroy_without_permission_to_delete_results_deletes_nothing_from_the_bucket(fleet: Fleet) -> None:
    fleet.apply("-var=running=false")  # gives the policy back
    fleet.destroy(codes=(1,))
    assert f"The bucket {fleet.bucket()} and its key stay as they are" in " ".join(fleet.said)
    assert_bucket_is_protected(fleet)
    assert fleet.key()["KeyState"] == "Enabled"
    assert fleet.groups() == {}
    assert own_vpcs(fleet) == []
    s3 = fleet.aws("s3")
    s3.delete_bucket_policy(Bucket=fleet.bucket())
    assert s3.get_object(Bucket=fleet.bucket(), Key=FILM)["Body"].read() == b"a film"


def test_destroy_leaves_nothing_also_if_the_images_are_gone(fleet: Fleet) -> None:
    fleet.apply("-var=running=false")
    discovery, ec2 = fleet.aws("servicediscovery"), fleet.aws("ec2")
    for service in discovery.list_services()["Services"]:  # as hosts do at boot
        address = {"AWS_INSTANCE_IPV4": "10.83.0.9"}
        discovery.register_instance(ServiceId=service["Id"], InstanceId=service["Name"], Attributes=address)
    for image in fleet.images.values():
        ec2.deregister_image(ImageId=image)
    fleet.paste("destroy")
    assert max(fleet.times(GROUPS, "Destruction complete")) < min(fleet.times(NEEDS, "Destroying"))
    assert fleet.groups() == {}
    assert own_vpcs(fleet) == []
    assert fleet.aws("s3").list_buckets()["Buckets"] == []
    assert discovery.list_services()["Services"] + discovery.list_namespaces()["Namespaces"] == []
    assert [one for one in fleet.aws("iam").list_roles()["Roles"] if one["RoleName"].startswith(NAME)] == []
    assert fleet.aws("logs").describe_log_groups()["logGroups"] == []
    assert fleet.aws("cloudwatch").describe_alarms()["MetricAlarms"] == []
    assert fleet.aws("sns").list_topics()["Topics"] == []
    assert ec2.describe_launch_templates()["LaunchTemplates"] == []
    reservations = ec2.describe_instances()["Reservations"]
    assert {one["State"]["Name"] for each in reservations for one in each["Instances"]} <= {"terminated"}
    assert fleet.key()["KeyState"] == "PendingDeletion"


def test_paper_comes_and_goes_and_a_bucket_of_ones_own_stays(tmp_path: Path) -> None:
    variables = ("-var=size=paper", "-var=bucket=my-results")
    with moto_server(tmp_path) as url:
        fleet = Fleet(tmp_path, url)
        s3 = fleet.aws("s3")
        s3.create_bucket(Bucket="my-results")
        s3.put_object(Bucket="my-results", Key="runs/run-1/learner/state", Body=b"of a run before")
        s3.create_bucket(Bucket="far-results", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
        said = fleet.plan("-var=bucket=far-results", codes=(1,))
        assert "bucket: far-results is in eu-west-1" in " ".join(said.split())
        fleet.apply(*variables)
        assert fleet.hosts() == {"replay": 1, "learner": 1, "actor": 6, "evaluator": 1}
        assert fleet.output("run_url") == "s3://my-results/runs/run-1"
        assert fleet.plan(*variables) == ""
        fleet.destroy(*variables)
        assert fleet.groups() == {}
        assert {one["Name"] for one in s3.list_buckets()["Buckets"]} == {"far-results", "my-results"}
        assert [one["Key"] for one in s3.list_objects_v2(Bucket="my-results")["Contents"]] == [
            "runs/run-1/learner/state"
        ]
