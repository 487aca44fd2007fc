"""Frozen or restarted processes in a fleet of real ones: what the others do meanwhile and afterwards."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.chaos.ledger import ledger_violations, newest_ledger, read_books
from tests.chaos.watch import Life
from tests.rigs.fleet import (
    BUSY_SECONDS,
    FORGOTTEN_SECONDS,
    Fleet,
    acts,
    begins,
    goes_on,
    lasts,
    losses_said,
    next_values,
)
from tests.rigs.processes import Programs, values, wait_until

GROWTH_BYTES = 8 * 2**20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Its parameter: settings of the run."""
    with Programs(tmp_path) as programs, Fleet(programs, tmp_path / "run", *getattr(request, "param", ())) as fleet:
        yield fleet


def settings(*settings: str) -> pytest.MarkDecorator:
    """Changes the settings of the test's run."""
    return pytest.mark.parametrize("fleet", [settings], indirect=True, ids=[",".join(settings)])


# Actors -----------------------------------------------------------------------------------------------------------


def test_fault_02_actor_frozen_for_30_s_shows_its_lag_catches_up_and_stores_nothing_twice(
    fleet: Fleet,
) -> None:
    fleet.start("replay", "learner", "actor-0", "actor-1")
    begins(fleet, actors=2)
    before = statistics.fmean(next_values(fleet, "actor-1", "actor/steps_per_second", 20))
    frozen = fleet.running["actor-1"]
    frozen.send(signal.SIGSTOP)
    wait_until(lambda: fleet.actors() == 1, FORGOTTEN_SECONDS)
    wait_until(lambda: fleet.newest("replay", "ledger/lost_with_actor", 0.0) > 0, BUSY_SECONDS)
    lasts(20)  # 30 in all
    goes_on(fleet)
    assert fleet.actors() == 1
    frames, lines = fleet.newest("learner", "step", 0.0), fleet.lines("actor-1")
    assert fleet.newest("actor-1", "step", 0.0) < frames, "with weights of how long ago it acts"
    frozen.send(signal.SIGCONT)
    wait_until(lambda: fleet.actors() == 2)
    acts(fleet, "actor-1")
    wait_until(lambda: fleet.newest("actor-1", "step", 0.0) >= frames)
    wait_until(lambda: fleet.newest("replay", "ledger/lost_with_actor", 1.0) == 0, BUSY_SECONDS)
    rates = values(fleet.directory, "actor-1", "actor/steps_per_second")[lines:]
    assert rates[0] < 0.1 * before, "over 30 s"
    wait_until(lambda: fleet.newest("actor-1", "actor/steps_per_second", 0.0) > 0.5 * before)
    assert fleet.running["replay"].stderr.count("has been silent for 10 s") == 1
    assert fleet.with_traceback() == []
    assert leave_in_order(fleet, "actor-0", "actor-1") == []


def leave_in_order(fleet: Fleet, *actors: str) -> list[str]:
    """Ends all processes in an order that leaves nothing in flight; returns the errors of the ledger."""
    for name in actors:
        assert fleet.end(name, by=signal.SIGTERM) == 128 + signal.SIGTERM
    wait_until(lambda: fleet.actors() == 0 and fleet.newest("replay", "ledger/in_flight", 1.0) == 0)
    for name in ("replay", "learner"):
        assert fleet.end(name, by=signal.SIGTERM) == 128 + signal.SIGTERM
    metrics = fleet.directory / "metrics"
    lives = [Life(name, 1, fleet.running[name], metrics=metrics / f"{name}.jsonl") for name in actors]
    books = read_books(fleet.directory, "replay", lives)
    assert len(books.steps) == len(actors)
    assert books.ledger["lost_with_actor"] == 0
    return ledger_violations(books)


def test_fault_03_an_actor_started_again_beside_its_half_open_connection_is_one_actor(fleet: Fleet) -> None:
    proxy = fleet.proxy("actor-0", "experience")
    fleet.start("replay", "learner", "actor-0")
    begins(fleet, actors=1)
    proxy.lose()
    lasts(1)  # what had passed is read: where something is not, the end of a process resets its connections
    assert fleet.end("actor-0") == -signal.SIGKILL
    fleet.start("actor-0")
    again = fleet.running["actor-0"]
    again.wait_until(lambda: "acting in " in again.stderr)
    assert proxy.open_connections == 2, "nobody has told the replay server that the first is no more"
    server = fleet.running["replay"]
    wait_until(lambda: "has been silent for 10 s" in server.stderr, FORGOTTEN_SECONDS)
    wait_until(lambda: fleet.actors() == 1, BUSY_SECONDS)
    acts(fleet, "actor-0")
    goes_on(fleet)
    assert fleet.actors() == 1
    assert server.stderr.count("has been silent for 10 s") == 1
    assert fleet.dropped().keys() <= {"stale_priority"}
    assert fleet.with_traceback() == []


# Slow peers -------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """The observable state of a fleet while one of its processes is frozen."""

    ledger: dict[str, float]
    steps: float  # of the actor, as it says itself
    wait_share: float  # of the actor
    memory_bytes: dict[str, float]  # of all but the frozen one


def look_at(fleet: Fleet, frozen: str) -> Seen:
    others = [name for name in fleet.running if name != frozen]
    return Seen(
        newest_ledger(fleet.directory, "replay"),
        fleet.newest("actor-0", "actor/environment_steps", 0.0),
        fleet.newest("actor-0", "actor/wait_seconds_share", 0.0),
        {name: fleet.newest(name, "system/resident_memory_bytes", 0.0) for name in others},
    )


def freeze(fleet: Fleet, name: str) -> tuple[Seen, Seen]:
    """Stops a process for 30 s; returns the state after the others gave it up, and at the end."""
    fleet.running[name].send(signal.SIGSTOP)
    lasts(FORGOTTEN_SECONDS)
    early = look_at(fleet, name)
    lasts(FORGOTTEN_SECONDS)
    late = look_at(fleet, name)
    fleet.running[name].send(signal.SIGCONT)
    for other, memory_bytes in late.memory_bytes.items():
        assert memory_bytes < early.memory_bytes[other] + GROWTH_BYTES, other
    return early, late


def adds_up(ledger: dict[str, float]) -> bool:
    return ledger["produced"] == sum(number for fate, number in ledger.items() if fate != "produced")


def recovers(fleet: Fleet) -> None:
    """Waits until all three processes work again, and checks for forbidden consequences."""
    goes_on(fleet)
    acts(fleet, "actor-0")
    stored = fleet.newest("replay", "ledger/stored", 0.0)
    wait_until(lambda: fleet.newest("replay", "ledger/stored", 0.0) > stored)
    assert fleet.newest("learner", "learner/replay_disconnects", 0.0) == 1
    assert losses_said(fleet) == 1
    assert fleet.with_traceback() == []


def started(fleet: Fleet) -> None:
    fleet.start("replay", "learner", "actor-0")
    begins(fleet, actors=1)
    acts(fleet, "actor-0")


@settings("actor.overflow=wait")
def test_fault_14_an_actor_waits_for_a_learner_that_is_frozen_for_30_s_and_nothing_grows(fleet: Fleet) -> None:
    started(fleet)
    early, late = freeze(fleet, "learner")
    assert late.ledger == early.ledger
    assert late.steps == early.steps
    assert late.wait_share > 0.9
    assert adds_up(late.ledger)
    assert late.ledger["dropped_overflow"] == 0
    recovers(fleet)


@settings("replay.samples_per_insert=0")  # nothing but the server itself holds the actor back
def test_fault_15_an_actor_waits_for_a_replay_that_is_frozen_for_30_s_and_nothing_grows(fleet: Fleet) -> None:
    started(fleet)
    assert statistics.median(values(fleet.directory, "actor-0", "actor/wait_seconds_share")[-8:]) < 0.5
    early, late = freeze(fleet, "replay")
    assert late.steps == early.steps
    assert late.wait_share > 0.9
    recovers(fleet)
    assert fleet.newest("actor-0", "actor/replay_disconnects", 0.0) == 1
    wait_until(lambda: statistics.median(values(fleet.directory, "actor-0", "actor/wait_seconds_share")[-8:]) < 0.5)
