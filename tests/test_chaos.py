"""The chaos soak, a minute of it, and that its invariants are broken by what should break them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from tests.chaos import ledger_violations, soak
from tests.chaos_watch import Advance, Learning, Life, Limits, Sample, growth
from tests.processes import Program

MIB = 2**20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fault_38_a_minute_of_chaos_breaks_nothing_that_must_hold(tmp_path: Path) -> None:
    text, figures = soak(tmp_path, minutes=1, seed=1)
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


def test_fault_38_a_process_that_grows_is_named() -> None:
    flat = [life("replay", 1, (300, 40, 10), (310, 42, 10), (305, 41, 11))]
    assert growth(flat, Limits()) == []
    growing = [life("replay", 1, (300, 40, 10), (500, 60, 14), (700, 80, 20))]
    assert growth(growing, Limits()) == [
        "replay, life 1, grew: memory 300 -> 700 MiB",
        "replay, life 1, grew: fds 40 -> 80",
        "replay, life 1, grew: threads 10 -> 20",
    ]


def test_fault_38_a_process_larger_than_another_of_its_role_is_named() -> None:
    lives = [life("actor-0", 1, (300, 40, 10)), life("actor-1", 2, (300, 90, 10))]
    assert growth(lives, Limits()) == ["actor, life 2, is larger than another: fds 40 -> 90"]


def line(**values: float) -> str:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return json.dumps({"time": 0.0, "seconds": 0.0, "step": 0.0, **named}) + "\n"


def test_fault_38_progress_is_what_grows_also_after_a_fall(tmp_path: Path) -> None:
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
def test_fault_38_a_curve_that_falls_back_to_its_start_is_named(
    tmp_path: Path, returns: list[float], complaints: int
) -> None:
    path = tmp_path / "evaluator.jsonl"
    path.write_text("".join(line(eval__episodic_return=value) for value in returns))
    learning = Learning(path)
    learning.read()
    assert len(learning.relapses()) == complaints


def test_fault_38_a_ledger_that_does_not_add_up_is_named() -> None:
    assert ledger_violations({}) == []
    assert ledger_violations({"ledger/produced": 10.0, "ledger/stored": 8.0, "ledger/dropped_corrupt": 2.0}) == []
    assert len(ledger_violations({"ledger/produced": 10.0, "ledger/stored": 8.0})) == 1
