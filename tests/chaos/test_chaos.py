"""A minute of the chaos soak, and tests that its checks detect violations."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from apex_jax.replay.ledger import TransitionCounts
from tests.chaos.__main__ import KINDS, OTHERS, PAUSE_SECONDS, soak
from tests.chaos.deck import Deck
from tests.chaos.ledger import Books, ledger_violations
from tests.chaos.watch import Advance, Learning, Life, Sample, growth
from tests.rigs.processes import Program

MIB = 2**20
CARDS = [(name, kind) for name in ("replay", *OTHERS) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fault_38_a_minute_of_chaos_violates_no_invariant(tmp_path: Path) -> None:
    text, figures = soak(tmp_path, minutes=1, seed=1)
    assert figures["violations"] == [], text
    assert sum(figures["faults"].values()) >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fault_40_a_minute_of_chaos_with_three_replay_servers_violates_no_invariant(tmp_path: Path) -> None:
    text, figures = soak(tmp_path, minutes=1, seed=1, servers=3)
    assert figures["violations"] == [], text
    assert sum(figures["faults"].values()) >= 2


def life(name: str, number: int, *levels: tuple[int, int, int]) -> Life:
    """A process that held each of these (MiB, fds, threads) for a minute."""
    samples = [
        Sample(40.0 + 60 * minute + second, mebibytes * MIB, fds, threads)
        for minute, (mebibytes, fds, threads) in enumerate(levels)
        for second in range(0, 60, 2)
    ]
    return Life(name, number, cast(Program, None), samples=samples, working_seconds=10.0)


def straight(memory: float, fds: float, threads: float) -> Life:
    """A learner that grows evenly over half an hour by this much, from 400 MiB, 30 fds and 20 threads."""
    samples = [
        Sample(40.0 + 1800 * part, int((400 + memory * part) * MIB), round(30 + fds * part), round(20 + threads * part))
        for part in (number / 899 for number in range(900))
    ]
    return Life("learner", 1, cast(Program, None), samples=samples, working_seconds=10.0)


def test_fault_38_process_of_constant_size_is_not_reported() -> None:
    assert growth([life("replay", 1, (300, 40, 10), (310, 42, 10), (305, 41, 11))]) == []
    assert growth([straight(memory=30, fds=4, threads=1)]) == []


def test_fault_38_process_that_grows_in_steps_is_reported() -> None:
    assert growth([life("replay", 1, (300, 40, 10), (500, 60, 14), (700, 80, 20))]) == [
        "replay, life 1, grew: memory 300 -> 700 MiB",
        "replay, life 1, grew: fds 40 -> 80",
        "replay, life 1, grew: threads 10 -> 20",
    ]


@pytest.mark.parametrize(("grows", "what"), [((75, 0, 0), "memory"), ((0, 9, 0), "fds"), ((0, 0, 3), "threads")])
def test_fault_38_slow_leak_is_reported(grows: tuple[float, float, float], what: str) -> None:
    (line,) = growth([straight(*grows)])
    assert line.startswith(f"learner, life 1, grew: {what}")


def test_fault_38_a_learner_is_working_once_its_updates_grow_and_others_once_they_write_metrics(tmp_path: Path) -> None:
    me = cast(Program, SimpleNamespace(process=SimpleNamespace(pid=os.getpid())))
    path = tmp_path / "learner.jsonl"
    path.write_text(line(learner__updates=5))  # of a life before
    learner, replay = (Life(name, 2, me, metrics=path) for name in ("learner", "replay"))
    works = []
    for updates in (50, 50, 60):  # as its checkpoint says, while it compiles, and then
        with path.open("a") as file:
            file.write(line(learner__updates=updates))
        learner.take_sample()
        replay.take_sample()
        works.append((learner.working_seconds < float("inf"), replay.working_seconds < float("inf")))
    assert works == [(False, True), (False, True), (True, True)]


def test_fault_38_process_larger_than_another_of_its_role_is_reported() -> None:
    lives = [life("actor-0", 1, (300, 40, 10)), life("actor-1", 1, (300, 90, 10))]
    assert growth(lives) == ["actor-1, life 1, is larger than another of its role: fds 40 -> 90"]


# The schedule -----------------------------------------------------------------------------------------------------


def other_than(broken: str | None) -> Callable[[str], bool]:
    return lambda name: name != broken


@pytest.mark.parametrize("seed", range(20))
def test_fault_38_every_process_has_every_fault_within_the_half_hour(seed: int) -> None:
    rng = random.Random(seed)
    deck, broken, drawn = Deck(rng, CARDS), None, []
    for _ in range(int(30 * 60 / max(PAUSE_SECONDS))):
        card = deck.draw(other_than(broken))  # what was broken last is still down
        if card is not None:
            drawn.append(card)
        broken = card[0] if card is not None else None
    assert set(drawn) == set(CARDS)


# Progress ---------------------------------------------------------------------------------------------------------


def line(**values: float) -> str:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return json.dumps({"time": 0.0, "seconds": 0.0, "step": 0.0, **named}) + "\n"


def test_fault_38_progress_counts_growth_even_after_a_decrease(tmp_path: Path) -> None:
    path = tmp_path / "learner.jsonl"
    path.write_text("".join(line(learner__updates=updates) for updates in (10, 50, 20, 30)))
    advance = Advance(path, "learner/updates")
    advance.read()
    assert advance.total == 40 + 10


@pytest.mark.parametrize(
    ("returns", "complaints"),
    [([-0.6, 0.9, 1.0, 0.9], 0), ([-0.6, 0.9, -0.6, -0.6, -0.6], 1), ([-0.6, -0.5], 1), ([], 1)],
    ids=["learned", "relapsed", "never", "nothing"],
)
def test_fault_38_curve_that_falls_back_to_its_start_is_reported(
    tmp_path: Path, returns: list[float], complaints: int
) -> None:
    path = tmp_path / "evaluator.jsonl"
    path.write_text("".join(line(eval__episodic_return=value) for value in returns))
    learning = Learning(path)
    learning.read()
    assert len(learning.relapses()) == complaints


# The ledger -------------------------------------------------------------------------------------------------------


def sound_books() -> Books:
    """Of one actor that was killed with 60 transitions, and one that left with 40."""
    outcomes = {
        "stored": 900.0,
        "in_flight": 0.0,
        "lost_with_actor": 60.0,
        "lost_with_replay": 0.0,
        "dropped_unsent": 40.0,
    }
    killed = TransitionCounts(stored=300, produced=360, acknowledged=300)
    left = TransitionCounts(stored=600, produced=640, acknowledged=570, unsent=40)
    return Books({"produced": 1_000.0, **outcomes}, {1: killed, 2: left}, inserted=900, steps={2: 640})


def test_fault_38_correct_ledger_is_not_reported() -> None:
    assert ledger_violations(sound_books()) == []


def test_fault_38_ledger_that_does_not_add_up_is_reported() -> None:
    books = sound_books()
    books.ledger["produced"] += 1
    assert [line.partition(":")[0] for line in ledger_violations(books)] == ["the ledger does not add up"]


@pytest.mark.parametrize("outcome", ["in_flight", "lost_with_replay"])
def test_fault_38_transitions_in_flight_without_an_owner_are_reported(outcome: str) -> None:
    books = sound_books()
    books.ledger["lost_with_actor"] -= 30
    books.ledger[outcome] += 30
    assert ledger_violations(books) == [f"the ledger ends with 30 transitions {outcome}"]


def test_fault_38_missing_segment_is_reported_even_if_the_ledger_adds_up() -> None:
    books = sound_books()
    for name in ("produced", "stored"):  # neither counted when it was produced nor when it was stored
        books.ledger[name] -= 30
    books.accounts[2].produced -= 30
    books.accounts[2].stored -= 30
    assert ledger_violations(books) == [
        "the ledger has 870 transitions stored, the replay 900",
        "actor 0000000000000002 made 640 transitions, its account has 610 produced",
        "actor 0000000000000002 made 640 transitions, its account has 610 stored or dropped",
    ]
    books = sound_books()  # stored, and said to be lost with the actor
    books.ledger["stored"] -= 30
    books.ledger["lost_with_actor"] += 30
    books.accounts[2].stored -= 30
    assert ledger_violations(books) == [
        "the ledger has 870 transitions stored, the replay 900",
        "actor 0000000000000002 made 640 transitions, its account has 610 stored or dropped",
    ]


def test_fault_38_actor_missing_in_the_ledger_is_reported() -> None:
    books = sound_books()
    del books.accounts[2]
    assert len(ledger_violations(books)) == 2
