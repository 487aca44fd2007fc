"""Frozen and lost processes in a fleet of real ones: what the others do meanwhile and afterwards."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from apex_jax.config.load import load
from apex_jax.run.metrics import read_metrics
from tests.rigs.fleet import (
    FORGOTTEN_SECONDS,
    Fleet,
    acts,
    begins,
    goes_on,
    lasts,
    ledger_violations,
    losses_said,
    newest_ledger,
)
from tests.rigs.processes import ROOT, Programs, values, wait_until

MINIMUM = load(ROOT / "configs" / "catch.yaml").replay.min_size_to_sample
LOST = re.compile(r"the replay server at \S+ is lost: looking for it")
GROWTH_BYTES = 8 * 2**20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Programs(tmp_path) as programs, Fleet(programs, tmp_path / "run") as fleet:
        yield fleet


# Actors -----------------------------------------------------------------------------------------------------------


def test_fault_02_actor_frozen_for_30_s_shows_its_lag_catches_up_and_stores_nothing_twice(
    fleet: Fleet,
) -> None:
    fleet.start("replay", "learner", "actor-0", "actor-1")
    begins(fleet, actors=2)
    frozen = fleet.running["actor-1"]
    frozen.send(signal.SIGSTOP)
    wait_until(lambda: fleet.actors() == 1, FORGOTTEN_SECONDS)
    lasts(20)  # 30 in all
    goes_on(fleet)
    assert fleet.actors() == 1
    frames = fleet.newest("learner", "step", 0.0)
    assert fleet.newest("actor-1", "step", 0.0) < frames, "with weights of how long ago it acts"
    frozen.send(signal.SIGCONT)
    wait_until(lambda: fleet.actors() == 2)
    acts(fleet, "actor-1")
    wait_until(lambda: fleet.newest("actor-1", "step", 0.0) >= frames)
    assert fleet.running["replay"].stderr.count("has been silent for 10 s") == 1
    assert fleet.with_traceback() == []
    assert leave_in_order(fleet, "actor-0", "actor-1") == []


def leave_in_order(fleet: Fleet, *actors: str) -> list[str]:
    """Ends the actors first, so that the replay has all that they made; returns the errors of the ledger."""
    for name in actors:
        assert fleet.end(name, by=signal.SIGTERM) == 128 + signal.SIGTERM
    wait_until(lambda: fleet.actors() == 0)
    for name in ("replay", "learner"):
        assert fleet.end(name, by=signal.SIGTERM) == 128 + signal.SIGTERM
    return ledger_violations(fleet.directory, {name: fleet.running[name] for name in actors})


# Slow peers -------------------------------------------------------------------------------------------------------


def test_fault_14_an_actor_waits_for_a_learner_that_is_frozen_for_30_s_and_nothing_grows(fleet: Fleet) -> None:
    fleet.start("replay", "learner", "actor-0")
    begins(fleet, actors=1)
    acts(fleet, "actor-0")

    def counts() -> tuple[dict[str, float], float]:
        return newest_ledger(fleet.directory), fleet.newest("actor-0", "actor/environment_steps", 0.0)

    def memory_bytes(name: str) -> float:
        return fleet.newest(name, "system/resident_memory_bytes", 0.0)

    fleet.running["learner"].send(signal.SIGSTOP)
    lasts(FORGOTTEN_SECONDS)
    early, before = counts(), {name: memory_bytes(name) for name in ("replay", "actor-0")}
    lasts(FORGOTTEN_SECONDS)
    assert counts() == early, "the others have given the learner up"
    assert all(memory_bytes(name) < before[name] + GROWTH_BYTES for name in before)
    assert fleet.newest("actor-0", "actor/wait_seconds_share", 0.0) > 0.9
    ledger = early[0]
    assert ledger.keys() == {"produced", "stored"}, "nothing is refused"
    fleet.running["learner"].send(signal.SIGCONT)
    goes_on(fleet)
    acts(fleet, "actor-0")
    wait_until(lambda: fleet.newest("replay", "ledger/stored", 0.0) > ledger["stored"])
    assert fleet.newest("learner", "learner/replay_disconnects", 0.0) == 1
    assert losses_said(fleet) == 1
    assert fleet.with_traceback() == []


# The replay server starts empty ----------------------------------------------------------------------------------


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


def test_fault_04_learner_and_actor_of_a_fleet_wait_for_an_empty_replay_and_go_on_without_a_restart(
    tmp_path: Path,
) -> None:
    with Programs(tmp_path) as programs, Fleet(programs, tmp_path / "run", "replay.journal=false") as fleet:
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
