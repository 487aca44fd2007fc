"""The fleet as its user data boots it: hosts in namespaces, units' own command lines, tcp with CURVE, moto for AWS.

It learns Catch, or what APEX_JAX_FLEET_GAME says: `make test-fleet GAME=Pong`.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from apex_jax.run.metrics import read_metrics
from deploy.tests.boxes import GATEWAY, Bridge
from deploy.tests.hosts import Host, Hosts, make_image, stored
from deploy.tests.tools import CREDENTIALS, aws, moto_server, rendered_user_data
from tests.rigs.processes import ROOT

ACTORS = 3
HOSTS = ("actor", "actor", "actor", "evaluator", "learner", "replay")  # whom they need comes last


class Game(NamedTuple):
    """The game of a fleet and the required score."""

    task: str
    config_file: str
    host_environments: int
    score: float  # mean return of an evaluation, which only learning reaches
    learning_minutes: float
    patience_minutes: float  # for anything else
    timer_seconds: float  # of health and results, instead of a minute
    settings: dict[str, str]


GAMES = {
    "Catch": Game(
        task="Catch-v0",
        config_file="catch.yaml",
        host_environments=8,
        score=0.5,  # of -1 to 1; by chance it is -0.6
        learning_minutes=10,
        patience_minutes=6,
        timer_seconds=10,
        settings={
            "metrics_interval_seconds": "0.5",
            "learner.checkpoint_interval_seconds": "2",
            "storage.interval_seconds": "2",
            "evaluator.interval_seconds": "1",
        },
    ),
    "Pong": Game(
        task="Pong-v5",
        config_file="pong_cpu.yaml",
        host_environments=11,  # three hosts have the configuration's 32, and one
        score=-10,  # of -21 to 21; by chance it is -20.7
        learning_minutes=40,
        patience_minutes=10,
        timer_seconds=30,  # six hosts share the cores with the game
        settings={
            "actor.max_outstanding_segments": "5",  # of 11 environments, as the configuration's 16 of 32
            "metrics_interval_seconds": "2",
            "learner.checkpoint_interval_seconds": "20",
            "storage.interval_seconds": "20",
        },
    ),
}
GAME = GAMES[os.environ.get("APEX_JAX_FLEET_GAME", "Catch")]
UNTIL_STOPPED = {"total_updates": "0", "total_minutes": "100000"}
BUCKET = "fleet-results"

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.slow,
    pytest.mark.timeout(60 * (30 + GAME.learning_minutes + 4 * GAME.patience_minutes)),
]


class Fleet(NamedTuple):
    """A running fleet with its harness."""

    url: str
    hosts: Hosts

    def all(self, role: str) -> list[Host]:
        return [host for host in self.hosts.all if host.role == role]

    def of(self, name: str) -> Host:
        """Returns a host by its role, or by the name of its replay server."""
        return next(host for host in self.hosts.all if host.name == name)

    def wait(self, condition: Callable[[], bool], what: str, minutes: float = GAME.patience_minutes) -> None:
        deadline, pause = time.monotonic() + 60 * minutes, threading.Event()
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(host.log(3000) for host in self.hosts.all)
                raise AssertionError(f"{what}: not within {minutes:g} minutes\n{logs}")
            pause.wait(0.5)

    def value(self, host: Host, tag: str, since: float = 0.0) -> float:
        """Returns the newest value of a tag that a host has written since then; -1 where there is none."""
        return next((float(line[tag]) for line in reversed(metrics(host, since)) if line.get(tag) is not None), -1.0)

    def updates(self, since: float = 0.0) -> float:
        return self.value(self.of("learner"), "learner/updates", since)

    def wait_for_progress(self, what: str) -> None:
        """Waits until the learner continues with experience that is newer than the call."""
        now, updates = time.time(), self.updates()
        self.wait(lambda: self.updates(now) > updates + 100, f"{what}: learning")
        self.wait(lambda: self.of_replay("replay/inserts_per_second", now) > 0, f"{what}: experience")
        self.wait(lambda: self.of_replay("replay/actors", now) == ACTORS, f"{what}: {ACTORS} actors")

    def of_replay(self, tag: str, since: float) -> float:
        """Returns what the replay server has reported under a tag after a time; -1 before that."""
        return self.value(self.of("replay"), tag, since)

    def wait_for_acting(self, host: Host, what: str) -> None:
        self.wait(lambda: self.value(host, "actor/steps_per_second") > 0, f"{what}: acting")

    def best_score(self, updates: float = 0.0) -> float:
        """Returns the best evaluation of weights of more than so many updates; -inf where there is none."""
        lines = [line for line in metrics(self.of("evaluator")) if line.get("eval/episodic_return") is not None]
        return max(
            (line["eval/episodic_return"] for line in lines if line["eval/updates"] > updates), default=-math.inf
        )

    def wait_for_score(self, what: str, updates: float = 0.0) -> None:
        what = f"{what}: an evaluation of {GAME.score:g} or more"
        self.wait(lambda: self.best_score(updates) >= GAME.score, what, GAME.learning_minutes)


def metrics(host: Host, since: float = 0.0) -> list[dict[str, Any]]:
    """Returns the lines that a host's role has written after a time (unix seconds)."""
    try:
        lines = read_metrics(host.run_directory / "metrics" / f"{host.name}.jsonl")
    except FileNotFoundError:
        return []
    return [line for line in lines if line["time"] > since]


def sizes(host: Host, since: float) -> list[float]:
    """Returns how many transitions a replay server has told it holds after a time, oldest first."""
    return [line["replay/size_transitions"] for line in metrics(host, since) if "replay/size_transitions" in line]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    assert os.geteuid() == 0, "hosts are network namespaces, which only root can make"
    folder = tmp_path_factory.mktemp("fleet")
    settings = ", ".join(f'"{key}" = "{value}"' for key, value in {**UNTIL_STOPPED, **GAME.settings}.items())
    user_data = rendered_user_data(
        folder, f'task = "{GAME.task}"', f'config_file = "{GAME.config_file}"', f'bucket = "{BUCKET}"',
        f"actor_hosts = {ACTORS}",
        f"actor_host_environments = {GAME.host_environments}",
        f"ladder_environments = {ACTORS * GAME.host_environments}", f"settings = {{ {settings} }}",
    )  # fmt: skip
    image = make_image(folder)
    with Bridge() as bridge, moto_server(folder, GATEWAY) as url:
        aws(url, "s3").create_bucket(Bucket=BUCKET)
        with Hosts(folder, image, user_data, url, bridge, GAME.timer_seconds) as hosts:
            for name in HOSTS:
                hosts.start(name)
            push_keys(url)  # after the hosts: they wait for them
            yield Fleet(url, hosts)


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


def test_hosts_of_the_fleet_find_each_other_and_train(fleet: Fleet) -> None:
    fleet.wait_for_progress("start")
    assert fleet.updates() > 100


def test_links_are_encrypted(fleet: Fleet) -> None:
    for name in ("replay", "learner", "actor"):
        assert "links over tcp are encrypted" in fleet.of(name).log()


def test_fleet_learns_its_game(fleet: Fleet) -> None:
    fleet.wait_for_score("training")
    assert fleet.best_score() >= GAME.score


def wait_until_stored(fleet: Fleet, name: str) -> None:
    fleet.wait(lambda: name in stored(fleet.url, BUCKET), f"{name} in the bucket")


@pytest.mark.parametrize("name", [
    "results/metrics/evaluator.jsonl", "learner/run_identity", "replay/run_identity",
])  # fmt: skip
def test_results_and_state_reach_the_bucket(fleet: Fleet, name: str) -> None:
    wait_until_stored(fleet, f"runs/run-1/{name}")
    assert f"runs/run-1/{name}" in stored(fleet.url, BUCKET)


def test_fleet_survives_the_loss_of_each_actor_host_and_takes_its_replacement_in(fleet: Fleet) -> None:
    lost = fleet.all("actor")
    assert len(lost) == ACTORS
    for number, host in enumerate(lost, 1):
        new = fleet.hosts.replace(host)
        what = f"after the loss of actor {number}"
        fleet.wait_for_acting(new, what)
        fleet.wait_for_progress(what)
    assert not {*lost} & {*fleet.all("actor")}


@pytest.mark.parametrize("role", ["evaluator", "learner"])
def test_fleet_survives_the_loss_of_a_host_and_takes_its_replacement_in(fleet: Fleet, role: str) -> None:
    before = fleet.updates()
    new = fleet.hosts.replace(fleet.of(role))
    if role == "learner":  # a new one, which knows only what is in the bucket
        fleet.wait(lambda: fleet.updates() > 0, "the learner's return")
        assert fleet.updates() > before / 2
    if role == "evaluator":
        fleet.wait(lambda: fleet.value(new, "eval/updates") > before, "an evaluation of newer weights")
    fleet.wait_for_progress(f"after the loss of {role}")
    assert new.exit_code() is None


def test_lost_replay_server_returns_with_its_copy(fleet: Fleet) -> None:
    lost, now = fleet.of("replay"), time.time()
    held = fleet.value(lost, "replay/size_transitions")
    fleet.hosts.lose(lost)
    new = fleet.hosts.start("replay")
    fleet.wait(lambda: sizes(new, now) != [], "the return of the replay server")
    assert "fetched the replay of the run from s3://" in new.log()
    assert sizes(new, now)[0] > held / 2
    fleet.wait_for_progress("after the loss of the replay server")
    assert new.exit_code() is None


def test_fleet_learns_on_with_keys_that_were_rotated(fleet: Fleet) -> None:
    def ends(host: Host) -> int:
        return host.log().count(f"apex-jax@{host.role}.service has ended: ")

    before = {host: host.secret_key() for host in fleet.hosts.all}
    ended, updates = {host: ends(host) for host in before}, fleet.updates()
    push_keys(fleet.url, "--rotate")
    for host in before:  # as deploy/README.md says
        host.run("systemctl", "restart", "apex-jax-boot.service")
    fleet.wait(lambda: all(host.secret_key() not in ("", old) for host, old in before.items()), "new keys on all hosts")
    restarted = "the end of each role, which holds the keys that it was started with"
    fleet.wait(lambda: all(ends(host) > ended[host] for host in before), restarted)
    fleet.wait_for_progress("with new keys")
    fleet.wait(lambda: fleet.value(fleet.of("evaluator"), "eval/updates") > updates, "an evaluation with new keys")
    assert fleet.hosts.all == [*before]


def test_stopped_fleet_has_stored_its_last_checkpoint_and_a_new_one_goes_on(fleet: Fleet) -> None:
    updates = fleet.updates()
    for host in list(fleet.hosts.all):
        host.shut_down()
        fleet.hosts.all.remove(host)
    for name in reversed(HOSTS):
        fleet.hosts.start(name)
    fleet.wait(lambda: fleet.updates() >= updates, "what had been learned")
    fleet.wait_for_progress("after stop and start")
    fleet.wait_for_score("after stop and start", updates)
    assert fleet.best_score(updates) >= GAME.score
