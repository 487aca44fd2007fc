"""Dying actors and network faults with real processes over tcp and proxies between them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from apex_jax.config.load import load
from apex_jax.run.metric_files import read_metrics
from apex_jax.workers.learner import CALLS_IN_FLIGHT
from tests.rigs.fleet import (
    ENDLESS,
    FORGOTTEN_SECONDS,
    START_SECONDS,
    Fleet,
    acts,
    begins,
    goes_on,
    lasts,
    losses_said,
    next_values,
)
from tests.rigs.processes import ROOT, Program, Programs, catch, leave, values, wait_until
from tests.rigs.proxy import Proxy

LATENCY_SECONDS = 0.2  # one way
LONG_SECONDS = 90.0  # for what takes ZMQ up to 30 s (a handshake that nobody answers) on a machine that is busy

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Programs(tmp_path) as programs, Fleet(programs, tmp_path / "run") as fleet:
        yield fleet


# Number 1: an actor is killed ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fault_01_others_go_on_without_a_killed_actor_and_it_returns_with_current_weights(fleet: Fleet) -> None:
    fleet.start("replay", "learner", "actor-0", "actor-1")
    begins(fleet, actors=2)
    assert fleet.end("actor-1") == -signal.SIGKILL
    wait_until(lambda: fleet.actors() == 1, FORGOTTEN_SECONDS)
    goes_on(fleet)
    acts(fleet, "actor-0")
    lines, frames = fleet.lines("actor-1"), fleet.newest("learner", "step", 0.0)
    assert fleet.newest("actor-1", "step", 0.0) < frames
    fleet.start("actor-1")
    acts(fleet, "actor-1")
    wait_until(lambda: fleet.actors() == 2)
    assert min(values(fleet.directory, "actor-1", "step")[lines:]) >= frames, "it never acts with weights of before"
    wait_until(lambda: fleet.newest("actor-1", "actor/weights_age_seconds", 1e9) < 5)
    assert fleet.dropped().keys() <= {"stale_priority"}, "what a dying actor sent in part is no message"
    assert fleet.with_traceback() == []


# Number 31: a connection is open and nothing passes --------------------------------------------------------------


@pytest.mark.slow
def test_fault_31_an_actor_whose_packets_are_lost_is_evicted_and_rejoins_when_they_arrive_again(fleet: Fleet) -> None:
    proxy = fleet.proxy("actor-1", "experience")
    fleet.start("replay", "learner", "actor-0", "actor-1")
    begins(fleet, actors=2)
    proxy.stop()
    wait_until(lambda: fleet.actors() == 1, FORGOTTEN_SECONDS)
    wait_until(lambda: fleet.newest("actor-1", "actor/replay_disconnects", 0.0) == 1, FORGOTTEN_SECONDS)
    goes_on(fleet)
    proxy.heal()
    wait_until(lambda: fleet.actors() == 2, LONG_SECONDS)
    acts(fleet, "actor-1")
    assert fleet.newest("actor-1", "actor/replay_disconnects", 0.0) == 1
    assert fleet.running["actor-1"].stderr.count("has been silent for") == 1
    assert fleet.running["replay"].stderr.count("has been silent for 10 s") == 1
    assert fleet.dropped().keys() <= {"stale_priority", "duplicate_segment"}
    assert fleet.with_traceback() == []


# Number 32: learner and replay are parted ------------------------------------------------------------------------


@pytest.mark.slow
def test_fault_32_a_partition_between_distant_learner_and_replay_ends_in_updates(fleet: Fleet) -> None:
    learner = load(ROOT / "configs" / "catch.yaml").learner
    one_draw_at_a_time = learner.updates_of_a_call(on_cpu=True) / (2 * LATENCY_SECONDS)
    proxy = fleet.proxy("learner", "sampling")
    # A distant learner is as fast as what it asks for ahead lets it be, whatever else this machine does meanwhile: a
    # partition that costs a quarter of that shows, and a busy minute does not.
    proxy.conditions.latency_seconds = LATENCY_SECONDS
    fleet.start("replay", "learner", "actor-0")
    begins(fleet, actors=1)
    before, connections = _rate(fleet), proxy.traffic.connections
    assert before > CALLS_IN_FLIGHT * one_draw_at_a_time, "prefetched batches hide latency"
    proxy.stop()
    lasts(30)
    held_at, waits = fleet.updates(), fleet.newest("learner", "learner/wait_seconds_share", 0.0)
    proxy.heal()
    wait_until(lambda: fleet.updates() > held_at + 500, LONG_SECONDS)
    assert any(_rate(fleet) >= 0.9 * before for _ in range(3)), f"{before} updates a second are never reached again"
    assert waits > 0.9, "the metrics of a parted learner say that it waits, ..."
    losses = fleet.newest("learner", "learner/replay_disconnects", -1.0)
    assert losses == 1, "... and that it has lost the replay once"
    assert losses_said(fleet) == fleet.running["learner"].stderr.count("is back after") == losses
    assert fleet.running["replay"].stderr.count("the learner has been silent") == 1
    # A connection that was begun meanwhile, and has shown nothing for ten seconds, is closed and counted; no other is.
    assert fleet.dropped().get("failed_handshake", 0.0) <= proxy.traffic.connections - connections
    assert fleet.dropped().keys() <= {"stale_priority", "failed_handshake"}
    assert fleet.dropped("learner") == {}
    assert fleet.newest("replay", "replay/samples_per_insert", 0.0) <= 9, "8 and what the error buffer allows"
    assert fleet.with_traceback() == []


def _rate(fleet: Fleet) -> float:
    """Returns the updates a second over 10 s, the first 5 s left out: of a start, or of a catching up."""
    next_values(fleet, "learner", "learner/updates", 60)
    lines = read_metrics(fleet.directory / "metrics" / "learner.jsonl")
    first, last = lines[-40], lines[-1]
    return (last["learner/updates"] - first["learner/updates"]) / (last["time"] - first["time"])


# Number 33: bad connections --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fault_33_bad_network_stops_no_process(fleet: Fleet) -> None:
    """Connections have a latency, then little bandwidth; they are reset, and those of an actor that ends close late."""
    links = (("actor-0", "experience"), ("actor-0", "weights"), ("learner", "sampling"))
    proxies = [fleet.proxy(name, link) for name, link in links]
    fleet.start("replay", "learner", "actor-0")
    begins(fleet, actors=1)

    def set_conditions(latency_seconds: float = 0.0, bytes_per_second: float = float("inf")) -> None:
        for proxy in proxies:
            proxy.conditions.latency_seconds, proxy.conditions.bytes_per_second = latency_seconds, bytes_per_second

    def goes_on_with_its_actor() -> None:
        goes_on(fleet)
        acts(fleet, "actor-0")

    set_conditions(latency_seconds=LATENCY_SECONDS)
    goes_on_with_its_actor()
    set_conditions(bytes_per_second=1e6)
    goes_on_with_its_actor()
    set_conditions()
    _reset(proxies)
    goes_on_with_its_actor()
    for proxy in proxies:
        proxy.conditions.slow_close_seconds = 5.0
    assert fleet.end("actor-0", by=signal.SIGTERM) == 128 + signal.SIGTERM
    fleet.start("actor-0")
    goes_on_with_its_actor()
    wait_until(lambda: fleet.actors() == 1)
    assert fleet.dropped().keys() <= {"stale_priority", "duplicate_segment"}
    assert fleet.with_traceback() == []


def _reset(proxies: list[Proxy]) -> None:
    """Resets every connection, and waits until each client has reconnected."""
    before = [proxy.traffic.connections for proxy in proxies]
    for proxy in proxies:
        proxy.reset()
    wait_until(lambda: all(proxy.traffic.connections > n for proxy, n in zip(proxies, before, strict=True)))


# Number 32 again, with the kernel's own means --------------------------------------------------------------------


class Namespaces:
    """Two machines in a network, with an address each and a cable that can be disconnected."""

    near_address, far_address = "10.213.77.1", "10.213.77.2"

    def __init__(self) -> None:
        self.near, self.far = (f"apex-jax-{os.getpid()}-{side}" for side in ("near", "far"))
        self._ip("netns", "add", self.near)
        self._ip("netns", "add", self.far)
        self._ip("-n", self.near, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", self.far)
        for name, address in ((self.near, self.near_address), (self.far, self.far_address)):
            self._ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            self._ip("-n", name, "link", "set", "lo", "up")
        self.plug()

    def plug(self) -> None:
        for name in (self.near, self.far):
            self._ip("-n", name, "link", "set", "cable", "up")

    def pull(self) -> None:
        self._ip("-n", self.far, "link", "set", "cable", "down")

    def close(self) -> None:
        for name in (self.near, self.far):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def _ip(self, *words: str) -> None:
        result = subprocess.run(["ip", *words], capture_output=True, text=True)
        assert result.returncode == 0, (
            f"`ip {' '.join(words)}` failed ({result.stderr.strip()}): this test needs iproute2 and the right to make"
            " network namespaces; run it as root"
        )


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    namespaces = Namespaces()
    yield namespaces
    namespaces.close()


@pytest.mark.slow  # it needs root
def test_fault_32_a_machine_that_is_disconnected_for_15_s_continues(namespaces: Namespaces, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    links = zip(("experience", "sampling", "weights"), (5550, 5551, 5552), strict=True)
    addresses = [f"addresses.{link}=tcp://{namespaces.near_address}:{port}" for link, port in links]
    arguments = catch(directory, ENDLESS, *addresses, "security.insecure=true")
    with Programs(tmp_path) as programs:

        def start(role: str, namespace: str) -> Program:
            prefix = ("ip", "netns", "exec", namespace)
            return programs.start("--role", role, "--name", role, *arguments, prefix=prefix)

        def newest(name: str, tag: str) -> float:
            return ([0.0, *values(directory, name, tag)])[-1]

        started = [start("replay", namespaces.near), start("learner", namespaces.near), start("actor", namespaces.far)]
        started[1].wait_until(
            lambda: newest("learner", "learner/updates") > 0 and newest("replay", "replay/actors") == 1, START_SECONDS
        )
        namespaces.pull()
        wait_until(lambda: newest("replay", "replay/actors") == 0, FORGOTTEN_SECONDS)
        lines = len(values(directory, "replay", "replay/actors"))
        wait_until(lambda: len(values(directory, "replay", "replay/actors")) > lines + 20)
        namespaces.plug()
        wait_until(lambda: newest("replay", "replay/actors") == 1, LONG_SECONDS)
        updates = newest("learner", "learner/updates")
        wait_until(lambda: newest("learner", "learner/updates") > updates + 100, LONG_SECONDS)
        leave(started)
        assert [program.stderr for program in started if "Traceback" in program.stderr] == []
