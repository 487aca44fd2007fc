"""Processes that end during a run, and a disk that is full: what the others do, what returns, and what is counted."""

from __future__ import annotations

import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from apex_jax.config.load import load
from apex_jax.environments.environment import segment_spec
from apex_jax.run.metric_files import read_metrics
from tests.rigs.fleet import Fleet
from tests.rigs.processes import Programs, values, wait_until
from tests.rigs.replay_processes import CATCH, Site, end

CONFIG = load(CATCH)
SPEC = segment_spec(CONFIG)
MINIMUM = CONFIG.replay.min_size_to_sample
LOST = re.compile(r"the replay server at \S+ is lost: looking for it")

pytestmark = pytest.mark.timeout(480)


@pytest.fixture
def site(tmp_path: Path, programs: Programs) -> Iterator[Site]:
    site = Site(tmp_path, programs)
    yield site
    site.close()


# A replay that starts empty ---------------------------------------------------------------------------------------


def updates_at_rest(fleet: Fleet) -> float:
    """Waits until the learner has nothing left to learn from; returns its updates."""

    def last_two_seconds() -> list[float]:
        return values(fleet.directory, "learner", "learner/updates")[-8:]

    fleet.running["learner"].wait_until(lambda: len(set(last_two_seconds())) == 1)
    return last_two_seconds()[-1]


def updates_below_the_minimum(fleet: Fleet, replay_lines: int) -> set[float]:
    """Returns the learner's counts while the replay, after this many lines of metrics, was below its minimum."""
    replay, learner = (read_metrics(fleet.directory / "metrics" / f"{name}.jsonl") for name in ("replay", "learner"))
    small = [line["time"] for line in replay[replay_lines:] if line["replay/size_transitions"] < MINIMUM]
    return {line["learner/updates"] for line in learner if small[0] <= line["time"] <= small[-1]}


@pytest.mark.slow
def test_fault_04_learner_and_actor_of_a_fleet_wait_for_an_empty_replay_and_go_on_without_a_restart(
    programs: Programs, tmp_path: Path
) -> None:
    with Fleet(programs, tmp_path / "run", "replay.journal=false") as fleet:
        fleet.start("replay", "learner", "actor-0")
        learner, actor = fleet.running["learner"], fleet.running["actor-0"]
        learner.wait_until(lambda: fleet.updates() > 0)
        before = programs.living()
        fleet.end("replay")
        learner.wait_until(lambda: "is lost: looking for it" in learner.stderr)
        actor.wait_until(lambda: LOST.search(actor.stderr))
        held, replay_lines = updates_at_rest(fleet), fleet.lines("replay")
        actor.send(signal.SIGSTOP)  # so that nothing comes before the empty replay has been looked at
        fleet.start("replay")
        replay = fleet.running["replay"]
        replay.wait_until(lambda: "joins; 0 segments are live" in replay.stderr)
        lines = fleet.lines("learner")
        learner.wait_until(lambda: fleet.lines("learner") >= lines + 8)
        assert fleet.updates() == held
        assert fleet.newest("replay", "replay/size_transitions", -1.0) == 0
        actor.send(signal.SIGCONT)
        learner.wait_until(lambda: fleet.updates() > held)
        assert updates_below_the_minimum(fleet, replay_lines) == {held}
        after = programs.living()
        assert {name: pid for name, pid in after.items() if name != "replay"} == {
            name: pid for name, pid in before.items() if name != "replay"
        }
        assert len(LOST.findall(actor.stderr)) == learner.stderr.count("is lost: looking for it") == 1
        assert learner.stderr.count("the replay server is back after") == 1
        actor.wait_until(lambda: actor.stderr.count("the replay server is back after") == 1)
        assert fleet.with_traceback() == []


# An actor that does not come back ---------------------------------------------------------------------------------


def assert_once_and_in_order(sequences: list[int]) -> None:
    assert sequences == list(range(1, len(sequences) + 1))


def adds_up(ledger: dict[str, float]) -> bool:
    return ledger["produced"] == sum(number for name, number in ledger.items() if name != "produced")


def all_accounted_for(site: Site) -> dict[str, float]:
    """Returns the ledger once the producers have left, none of them killed: what they count themselves is in it."""
    ledger = site.ledger()
    assert adds_up(ledger)
    assert ledger["produced"] == site.produced()
    assert ledger["in_flight"] == ledger["lost_with_actor"] == 0
    return ledger


# The replay server goes away --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fault_04_dropping_actors_go_on_without_a_replay_and_count(site: Site) -> None:
    server, producer = site.server(), site.producer(rate=300, overflow="drop")
    server.wait_until(lambda: producer.get("acknowledged") > 0)
    end(server, signal.SIGKILL)
    wait_until(lambda: producer.get("dropped").get("overflow", 0) > 100)
    server = site.server()
    producer.wait_for_more("acknowledged", 1_000)
    server.wait_until(lambda: site.value("replay/actors") == 1)
    assert producer.stop() == 0
    server.wait_until(lambda: site.value("replay/actors") == 0)
    end(server, signal.SIGTERM)
    ledger = all_accounted_for(site)
    assert ledger["dropped_overflow"] >= 100 * SPEC.max_transitions
    assert ledger["lost_with_replay"] == 0
    assert_once_and_in_order(site.journal()[producer.peer_id])


@pytest.mark.long
def test_fault_12_full_disk_stops_no_service_and_loses_no_acknowledged_segment(site: Site) -> None:
    server = site.server("replay.snapshot_interval_seconds=1")
    producer = site.producer(rate=100)
    server.wait_until(lambda: producer.get("acknowledged") > 1_000)
    pid = server.process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    # Of any file: room for the log of this server, and not for the segments of a second, the first delay.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4_096, hard))
    server.wait_until(lambda: "cannot write segments to" in server.stderr)
    server.wait_until(lambda: "cannot write a snapshot to" in server.stderr)
    producer.wait_for_more("acknowledged", 5_000)
    assert server.stderr.count("cannot write segments to") == 1
    assert server.stderr.count("cannot write a snapshot to") == 1
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    server.wait_until(lambda: "segments are written to" in server.stderr)
    server.wait_until(lambda: site.value("replay/journal_errors") > 0)
    producer.wait_for_more("acknowledged", 1_000)
    end(server, signal.SIGKILL)
    sequences = site.journal()[producer.peer_id]
    assert_once_and_in_order(sequences)
    assert len(sequences) * SPEC.max_transitions >= producer.get("acknowledged")
