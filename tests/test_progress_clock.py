"""The progress of a run does not depend on the wall clock, which somebody may set while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex_jax.operations.progress import ProgressReader
from tests.test_live_view import START, Clock, config, write


@pytest.mark.parametrize("jump_seconds", [-3600, 3600])
def test_wall_clock_that_is_set_changes_neither_times_nor_numbers(tmp_path: Path, jump_seconds: float) -> None:
    clock = Clock()
    reader = ProgressReader(str(tmp_path), config(total_minutes=30.0), clock)
    for second in range(40):
        clock.now = START + second  # never goes back
        wall = START + (0 if second < 20 else jump_seconds)
        values = {"learner__updates": second, "charts__updates_per_second": 1.0, "charts__elapsed_minutes": second / 60}
        write(tmp_path, "learner", second, 100 * second, wall, **values)
        now = reader.read()
        assert (now.elapsed_seconds, now.updates, now.frames) == (second, second, 100 * second)
        assert now.seconds_left == pytest.approx(1800 - second)
        assert now.warnings == ()


def test_progress_is_measured_by_a_clock_that_nobody_can_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ProgressReader(str(tmp_path), config())
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert 0 <= reader.read().elapsed_seconds < 60


def test_two_lines_around_a_clock_that_is_set_back_are_no_restart(tmp_path: Path) -> None:
    reader = ProgressReader(str(tmp_path), config(), Clock())
    write(tmp_path, "learner", 5, 200, learner__updates=2)
    write(tmp_path, "learner", 10, 300, START - 3600, learner__updates=3)
    now = reader.read()
    assert (now.roles["learner"], now.frames, now.updates) == ("running", 300, 3)


def test_minutes_of_earlier_starts_are_no_time_left_from_the_beginning(tmp_path: Path) -> None:
    write(tmp_path, "learner", 90, 200, learner__updates=2, charts__elapsed_minutes=1.5)
    clock = Clock()
    reader = ProgressReader(str(tmp_path), config(total_minutes=5.0), clock)
    assert reader.read().seconds_left == 210.0
    clock.now += 20  # in which the learner compiles, and writes nothing
    assert reader.read().seconds_left == 210.0
    clock.now += 1
    write(tmp_path, "learner", 1, 200, started=START + 120, charts__elapsed_minutes=1.2)  # of its checkpoint
    assert reader.read().seconds_left == 228.0
