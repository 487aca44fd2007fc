"""The programs beside the role on a host, as real processes, with moto and a stand-in for the role's status page."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.tests.conftest import StatusServer
from deploy.tests.tools import CREDENTIALS, aws, moto_server
from tests.rigs.processes import ROOT, wait_until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(180)]

FLEET = "apex-host-test"
PATH = f"/apex-jax/{FLEET}/keys"
RUN = "run-1 total_minutes=240"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with moto_server(tmp_path_factory.mktemp("moto")) as url:
        yield url


def command(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """Returns the command that starts a module like its unit."""
    return {
        "args": [sys.executable, "-m", module, *arguments],
        "cwd": ROOT,
        "env": {**{k: v for k, v in os.environ.items() if not k.startswith("AWS_")}, **CREDENTIALS, **environment},
    }


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        **command(module, *arguments, **environment), capture_output=True, text=True, timeout=100, check=False
    )


def put_keys(url: str, *files: str) -> None:
    for file in files:
        kind = "SecureString" if file.endswith(".secret") else "String"
        aws(url, "ssm").put_parameter(Name=f"{PATH}/{file}", Value=f"key of {file}", Type=kind, Overwrite=True)


def keys_environment(url: str, folder: Path, *files: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    return {
        "AWS_ENDPOINT_URL": url,
        "APEX_JAX_ROLE": "replay",
        "APEX_JAX_KEY_PATH": PATH,
        "APEX_JAX_KEY_FILES": " ".join(files),
        "APEX_JAX_KEYS": str(folder),
        "APEX_JAX_RETRY_SECONDS": "0.2",
    }


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_boot_writes_the_keys_with_the_secret_one_for_its_owner_alone(url: str, tmp_path: Path) -> None:
    put_keys(url, "replay.secret", "actor.public")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "learner.secret").write_text("of the role this host had before")
    done = run("deploy.host.boot", **keys_environment(url, tmp_path / "keys", "replay.secret", "actor.public"))
    assert done.returncode == 0, done.stderr
    assert {path.name: (path.read_text(), mode(path)) for path in (tmp_path / "keys").iterdir()} == {
        "replay.secret": ("key of replay.secret", 0o600),
        "actor.public": ("key of actor.public", 0o644),
    }
    assert "key of replay.secret" not in done.stdout + done.stderr


def test_boot_waits_for_keys_that_are_pushed_later(url: str, tmp_path: Path) -> None:
    environment = keys_environment(url, tmp_path / "keys", "late.secret")
    log = tmp_path / "log"
    with open(log, "w") as out, subprocess.Popen(**command("deploy.host.boot", **environment), stderr=out) as boot:
        try:
            wait_until(lambda: "deploy.push_keys" in log.read_text())
            assert boot.poll() is None
            put_keys(url, "late.secret")
            assert boot.wait(60) == 0
        finally:
            boot.kill()
    assert log.read_text().count("late.secret") == 1  # said once, not at each try


def test_boot_points_the_name_at_the_host_that_booted_last(url: str) -> None:
    name = "replay"
    discovery = aws(url, "servicediscovery")
    namespace = discovery.create_private_dns_namespace(Name=f"{name}.internal", Vpc=f"vpc-of-{name}")
    operation = discovery.get_operation(OperationId=namespace["OperationId"])["Operation"]
    records = {"DnsRecords": [{"Type": "A", "TTL": 10}]}
    made = discovery.create_service(Name=name, NamespaceId=operation["Targets"]["NAMESPACE"], DnsConfig=records)
    service = made["Service"]["Id"]
    before = {"AWS_INSTANCE_IPV4": "10.83.0.5"}
    discovery.register_instance(ServiceId=service, InstanceId=name, Attributes=before)
    done = run("deploy.host.boot", AWS_ENDPOINT_URL=url, APEX_JAX_SERVICE_ID=service, APEX_JAX_ROLE=name)
    assert done.returncode == 0, done.stderr
    instances = discovery.list_instances(ServiceId=service)["Instances"]
    assert {one["Id"] for one in instances} == {name}  # one identity: AWS overwrites it, moto appends
    assert instances[-1]["Attributes"]["AWS_INSTANCE_IPV4"] == "127.0.0.1"  # from which this machine reaches moto


def test_boot_does_nothing_outside_of_aws_and_names_what_the_environment_file_lacks() -> None:
    done = run("deploy.host.boot", APEX_JAX_ROLE="replay")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = run("deploy.host.boot", APEX_JAX_KEY_PATH=PATH)
    assert (done.returncode, done.stderr) == (2, "error: the environment file lacks 'APEX_JAX_KEY_FILES'\n")


STATUS = {"role": "replay", "healthy": True}
UNITS = {"running": "active", "ended": "inactive", "stopped": "inactive"}  # the state of a role's unit, for systemctl


@pytest.mark.parametrize(("name", "unit", "status", "healthy", "finished"), [
    ("replay", "running", STATUS, 1, 0),
    ("another", "running", {**STATUS, "problems": ["cannot write the journal"]}, 0, 0),
    ("actor", "running", None, 0, 0),
    ("learner", "ended", None, 1, 1),
    ("evaluator", "stopped", None, 0, 0),
])  # fmt: skip
def test_health_report_has_the_metrics_that_the_alarms_read(
    url: str, server: StatusServer, tmp_path: Path, name: str, unit: str, status: Any, healthy: int, finished: int
) -> None:
    server.code, server.content = (404, None) if status is None else (200, status)
    systemctl = tmp_path / "systemctl"
    shown = f"ActiveState={UNITS[unit]}\nExecMainCode=1\nExecMainStatus={143 if unit == 'stopped' else 0}"
    asked = f"show apex-jax@{name}.service"
    systemctl.write_text(f"""#!/bin/sh\n[ "$1 $2" = '{asked}' ] && echo '{shown}'\n""")
    systemctl.chmod(0o755)
    environment = {
        "APEX_JAX_ROLE": name,
        "APEX_JAX_STATUS": server.address,
        "APEX_JAX_NAMESPACE": f"ApexJax/{FLEET}/{name}",
        "APEX_JAX_RUN_AND_END": RUN,
        "APEX_JAX_DATA": str(tmp_path),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    done = run("deploy.host.report_health", AWS_ENDPOINT_URL=url, **environment)
    assert done.returncode == 0, done.stderr
    assert value_of(url, name, "Healthy") == healthy
    assert ("not healthy: " in done.stdout) == (not healthy)
    assert value_of(url, name, "Finished", Run=RUN) == finished
    assert 0 < value_of(url, name, "MemoryUsedPercent") < 100
    assert 0 < value_of(url, name, "DiskUsedPercent") <= 100


def value_of(url: str, role: str, metric: str, **dimensions: str) -> float:
    """Returns the largest value of a metric that was ever reported."""
    found = aws(url, "cloudwatch").get_metric_statistics(
        Namespace=f"ApexJax/{FLEET}/{role}", MetricName=metric,
        Dimensions=[{"Name": key, "Value": text} for key, text in dimensions.items()],
        StartTime=0, EndTime=4_000_000_000, Period=60, Statistics=["Maximum"],
    )  # fmt: skip
    return max(float(point["Maximum"]) for point in found["Datapoints"])


def of_a_run(url: str, bucket: str, run_directory: Path, role: str) -> dict[str, str]:
    storage = {"AWS_ENDPOINT_URL": url, "APEX_JAX_STORAGE": f"s3://{bucket}/runs/a"}
    return {**storage, "APEX_JAX_RUN": str(run_directory), "APEX_JAX_ROLE": role}


def results(url: str, action: str, run_directory: Path, role: str, bucket: str = "results") -> None:
    done = run("deploy.host.results", action, **of_a_run(url, bucket, run_directory, role))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def written(folder: Path, files: dict[str, str]) -> dict[str, str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return files


def files_in(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_results_of_all_hosts_make_one_run_directory(url: str, tmp_path: Path) -> None:
    s3 = aws(url, "s3")
    s3.create_bucket(Bucket="results")
    own: dict[str, str] = {}
    for role in ("replay", "learner", "evaluator"):
        shown = {f"metrics/{role}.jsonl": f"{role} 1", f"tensorboard/{role}/events.1": role}
        shown |= {"learner": {"config.yaml": "seed: 1"}, "evaluator": {"video.mp4": "film"}}.get(role, {})
        own |= written(tmp_path / role, shown)
        others = {"checkpoints/7/state": "large", "logs/x.log": "long", "metrics/other.jsonl": "not its own"}
        written(tmp_path / role, others)
        results(url, "copy", tmp_path / role, role)
    stored = s3.list_objects_v2(Bucket="results")["Contents"]
    assert {one["Key"].removeprefix("runs/a/results/") for one in stored} == set(own)

    (tmp_path / "evaluator/metrics/evaluator.jsonl").write_text("evaluator 1, and more")  # grown: sent again
    before = {one["Key"]: one["LastModified"] for one in stored}
    results(url, "copy", tmp_path / "evaluator", "evaluator")
    key = "runs/a/results/metrics/evaluator.jsonl"
    assert s3.get_object(Bucket="results", Key=key)["Body"].read() == b"evaluator 1, and more"
    after = {one["Key"]: one["LastModified"] for one in s3.list_objects_v2(Bucket="results")["Contents"]}
    assert {name for name in after if after[name] != before[name]} <= {key}

    results(url, "fetch", tmp_path / "replacement", "evaluator")
    assert files_in(tmp_path / "replacement") == {
        "metrics/evaluator.jsonl": "evaluator 1, and more",
        "tensorboard/evaluator/events.1": "evaluator",
        "video.mp4": "film",
    }


def test_fetched_results_replace_no_file_of_the_host_and_stay_in_the_run_directory(url: str, tmp_path: Path) -> None:
    s3 = aws(url, "s3")
    s3.create_bucket(Bucket="strange")
    for name in ("metrics/replay.jsonl", "tensorboard/replay/../x", "/etc/x"):
        s3.put_object(Bucket="strange", Key=f"runs/a/results/{name}", Body=b"older")
    newer = written(tmp_path / "run", {"metrics/replay.jsonl": "newer"})
    results(url, "fetch", tmp_path / "run", "replay", "strange")
    assert files_in(tmp_path / "run") == newer
    results(url, "fetch", tmp_path / "new", "replay", "strange")
    assert files_in(tmp_path / "new") == {"metrics/replay.jsonl": "older"}


def test_unreachable_bucket_is_reported_by_results(url: str, tmp_path: Path) -> None:
    done = run("deploy.host.results", "fetch", **of_a_run(url, "no-such-bucket", tmp_path, "replay"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: s3://no-such-bucket/runs/a: ")


@pytest.mark.parametrize(("arguments", "code", "line"), [
    (("Bad Name",), 2, "error: FLEET is 'Bad Name': give the fleet's `name`, 2 to 20 of a-z, 0-9 and '-'\n"),
    ((FLEET + "-x",), 1, None),
])  # fmt: skip
def test_push_keys_fails_with_one_line(arguments: tuple[str, ...], code: int, line: str) -> None:
    done = run("deploy.push_keys", *arguments, AWS_ENDPOINT_URL="http://127.0.0.1:9", AWS_MAX_ATTEMPTS="1")
    assert done.returncode == code
    assert done.stderr == line if line else done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_push_keys_makes_rotates_and_removes(url: str) -> None:
    def stored() -> dict[str, tuple[str, str]]:
        found = aws(url, "ssm").get_parameters_by_path(Path="/apex-jax/pushed/keys", WithDecryption=True)["Parameters"]
        return {one["Name"].rsplit("/", 1)[1]: (one["Type"], one["Value"]) for one in found}

    def push(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run("deploy.push_keys", "pushed", *arguments, AWS_ENDPOINT_URL=url)

    made = push()
    assert made.returncode == 0, made.stderr
    first = stored()
    assert len(first) == 8
    assert all((kind == "SecureString") == name.endswith(".secret") for name, (kind, _) in first.items())
    assert not any(value in made.stdout + made.stderr for _, value in first.values())
    refused = push()
    assert refused.returncode == 1
    assert "--rotate" in refused.stderr
    assert stored() == first
    assert push("--rotate").returncode == 0
    assert all(stored()[name] != first[name] for name in first)
    assert push("--delete").returncode == 0
    assert stored() == {}
