"""The fleet as its user data boots it: hosts in namespaces, units' own command lines, tcp with CURVE, moto for AWS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from apex_jax.metrics import read_metrics
from tests.deploy_hosts import GATEWAY, Bridge, Host, Hosts, make_image, stored
from tests.deploy_tools import CREDENTIALS, aws, moto_server, rendered_user_data
from tests.processes import ROOT, wait_until

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]

BUCKET = "fleet-results"
ACTORS = 3
PATIENCE_SECONDS = 240.0
SETTINGS = {
    "total_updates": "0",  # until it is stopped
    "metrics_interval_seconds": "0.5",
    "learner.checkpoint_interval_seconds": "2",
    "storage.interval_seconds": "2",
    "evaluator.interval_seconds": "1",
}


class Fleet(NamedTuple):
    """All of it, while it runs."""

    url: str
    hosts: Hosts
    bridge: Bridge

    def of(self, role: str) -> Host:
        return next(host for host in self.hosts.all if host.role == role)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(condition, PATIENCE_SECONDS)
        except AssertionError:
            logs = "\n".join(host.log(3000) for host in self.hosts.all)
            raise AssertionError(f"{what}: not within {PATIENCE_SECONDS:g} s\n{logs}") from None

    def value(self, role: str, tag: str) -> float:
        """Returns the newest value of a tag that the host of a role has written; -1 before the first."""
        try:
            lines = read_metrics(self.of(role).run_directory / "metrics" / f"{role}.jsonl")
        except FileNotFoundError:
            return -1.0
        return next((float(line[tag]) for line in reversed(lines) if line.get(tag) is not None), -1.0)

    def wait_for_progress(self, what: str) -> None:
        """Waits until the learner learns on, from experience that comes in."""
        updates = self.value("learner", "learner/updates")
        self.wait(lambda: self.value("learner", "learner/updates") > updates + 100, f"{what}: learning")
        self.wait(lambda: self.value("replay", "replay/inserts_per_second") > 0, f"{what}: experience")
        self.wait(lambda: self.value("replay", "replay/actors") == ACTORS, f"{what}: {ACTORS} actors")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    assert os.geteuid() == 0, "hosts are network namespaces, which only root can make"
    folder = tmp_path_factory.mktemp("fleet")
    settings = ", ".join(f'"{key}" = "{value}"' for key, value in SETTINGS.items())
    user_data = rendered_user_data(
        folder, 'task = "Catch-v0"', 'config_file = "catch.yaml"', f'bucket = "{BUCKET}"',
        "actor_host_environments = 8", "ladder_environments = 24", f"settings = {{ {settings} }}",
    )  # fmt: skip
    image = make_image(folder)
    with Bridge() as bridge, moto_server(folder, GATEWAY) as url:
        aws(url, "s3").create_bucket(Bucket=BUCKET)
        with Hosts(folder, image, user_data, url, bridge) as hosts:
            for role in ("actor", "actor", "actor", "evaluator", "learner", "replay"):  # whom they need comes last
                hosts.start(role)
            push_keys(url)  # after the hosts: they wait for them
            yield Fleet(url, hosts, bridge)


def push_keys(url: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.push_keys", "apex-jax", *arguments],
        cwd=ROOT,
        env={**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_fleet_finds_itself_and_learns(fleet: Fleet) -> None:
    fleet.wait_for_progress("start")
    assert fleet.value("learner", "learner/updates") > 100


def test_links_are_encrypted(fleet: Fleet) -> None:
    for role in ("replay", "learner", "actor"):
        assert "links over tcp are encrypted" in fleet.of(role).log()


def test_evaluation_reaches_the_bucket(fleet: Fleet) -> None:
    fleet.wait(lambda: fleet.value("evaluator", "eval/episodic_return") != -1.0, "an evaluation")
    name = "runs/run-1/results/metrics/evaluator.jsonl"
    wait_until_stored(fleet, name)
    assert fleet.value("evaluator", "eval/episodic_return") >= -1


def wait_until_stored(fleet: Fleet, name: str) -> None:
    fleet.wait(lambda: name in stored(fleet.url, BUCKET), f"{name} in the bucket")


@pytest.mark.parametrize("section", ["learner", "replay"])
def test_state_reaches_the_bucket(fleet: Fleet, section: str) -> None:
    name = f"runs/run-1/{section}/manifest.json"
    wait_until_stored(fleet, name)
    assert name in stored(fleet.url, BUCKET)


@pytest.mark.parametrize("role", ["actor", "evaluator", "replay", "learner"])
def test_fleet_survives_the_loss_of_a_host_and_takes_its_replacement_in(fleet: Fleet, role: str) -> None:
    before = fleet.value("learner", "learner/updates")
    fleet.hosts.replace(fleet.of(role))
    if role == "learner":  # a new one, which knows only what is in the bucket
        fleet.wait(lambda: fleet.value("learner", "learner/updates") > 0, "the learner's return")
        assert fleet.value("learner", "learner/updates") > before / 2
    if role == "evaluator":
        fleet.wait(lambda: fleet.value("evaluator", "eval/updates") > before, "an evaluation of newer weights")
    fleet.wait_for_progress(f"after the loss of {role}")


def test_spot_notice_ends_an_actor_before_its_instance_goes(fleet: Fleet) -> None:
    host = fleet.of("actor")
    fleet.bridge.spot_notices.add(host.address)
    fleet.wait(lambda: fleet.value("replay", "replay/actors") == ACTORS - 1, "the end of the role")
    assert host.is_up()
    fleet.hosts.replace(host)
    fleet.wait_for_progress("after a spot notice")


def test_stopped_fleet_has_stored_its_last_checkpoint_and_a_new_one_goes_on(fleet: Fleet) -> None:
    updates = fleet.value("learner", "learner/updates")
    for host in list(fleet.hosts.all):
        host.shut_down()
        fleet.hosts.all.remove(host)
    for role in ("replay", "learner", "actor", "actor", "actor", "evaluator"):
        fleet.hosts.start(role)
    fleet.wait(lambda: fleet.value("learner", "learner/updates") >= updates, "what had been learned")
    fleet.wait_for_progress("after stop and start")
    assert fleet.value("learner", "learner/updates") > updates
