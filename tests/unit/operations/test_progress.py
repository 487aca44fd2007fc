"""The progress of a run is read from the metrics of all its processes, and does not depend on the wall clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex_jax.config import EvaluatorConfig
from apex_jax.operations.progress import EvaluationSummary, ProgressReader
from tests.rigs.live_views import START, Clock, config, write


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
        assert now.seconds_left == (None if second < 5 else pytest.approx(1800 - second))
        assert now.warnings == ()


def test_minutes_of_earlier_starts_reduce_the_time_left(tmp_path: Path) -> None:
    write(tmp_path, "learner", 90, 200, learner__updates=2, charts__elapsed_minutes=1.5)
    clock = Clock()
    reader = ProgressReader(str(tmp_path), config(total_minutes=5.0), clock)
    clock.now += 20  # in which the learner compiles, and writes nothing
    assert reader.read().share == 0.3
    clock.now += 1
    values = {"charts__elapsed_minutes": 1.2, "charts__updates_per_second": 8.0}  # of its checkpoint
    write(tmp_path, "learner", 1, 200, started=START + 120, **values)
    assert reader.read().seconds_left is None
    clock.now += 6
    assert reader.read().seconds_left == pytest.approx(222)


@pytest.mark.parametrize(("limits", "share", "reached"), [
    ({}, None, ()),
    ({"total_updates": 1000}, 0.25, ()),
    ({"total_updates": 1000, "total_environment_frames": 800}, 0.5, ()),
    ({"total_minutes": 4.0}, 0.5, ()),
    ({"total_updates": 100}, 1.0, ("total_updates=100",)),
    ({"total_environment_frames": 400}, 1.0, ("total_environment_frames=400",)),
    ({"total_minutes": 2.0}, 1.0, ("total_minutes=2.0",)),
    ({"evaluator": EvaluatorConfig(stop_at_return=7.5)}, 1.0, ("evaluator.stop_at_return=7.5",)),
    ({"evaluator": EvaluatorConfig(stop_at_return=7.6)}, 0.0, ()),
])  # fmt: skip
def test_share_of_the_run_is_that_of_its_nearest_limit_which_ends_it(
    tmp_path: Path, limits: dict[str, float], share: float | None, reached: tuple[str, ...]
) -> None:
    reader = ProgressReader(str(tmp_path), config(**limits), Clock())
    values = {"learner__updates": 250, "charts__elapsed_minutes": 2.0, "charts__updates_per_second": 8.0}
    write(tmp_path, "learner", 5, 400, **values)
    for value in (3.0, 7.5, 7.0):
        write(tmp_path, "evaluator", 0, 400, eval__episodic_return=value)
    now = reader.read()
    assert (now.share, now.reached_limits) == (share, reached)
    assert now.phase == ("finishing" if reached else "learning")


def test_run_passes_from_starting_over_filling_and_learning_to_finishing(tmp_path: Path) -> None:
    reader = ProgressReader(str(tmp_path), config(total_updates=100), Clock())
    size, rate = "replay__size_transitions", "charts__updates_per_second"
    phases = [reader.read().phase]
    for name, seconds, values in (
        ("replay", 1, {size: 0}),
        ("learner", 1, {"learner__updates": 0, rate: 0.0}),  # no actor has sent anything
        ("replay", 1, {size: 10}),
        ("replay", 2, {size: 5000}),
        ("learner", 9, {"learner__updates": 40, rate: 8.0}),
        ("learner", 14, {"learner__updates": 40, rate: 0.0}),  # it waits for batches; it does not go back
        ("learner", 19, {"learner__updates": 100, rate: 8.0}),
    ):
        write(tmp_path, name, seconds, 4000, **values)
        phases.append(reader.read().phase)
    assert phases[:3] == ["starting the replay server", "starting the learner", "starting the actors"]
    assert phases[3:] == ["filling the replay", "compiling the learner", "learning", "learning", "finishing"]


def test_numbers_come_from_the_files_of_all_processes(tmp_path: Path) -> None:
    clock = Clock()
    reader = ProgressReader(str(tmp_path), config(total_environment_frames=100_000), clock)
    assert reader.read().frames == 0
    memory = "system__resident_memory_bytes"
    write(tmp_path, "replay", 5, 8400, replay__size_transitions=2100, replay__samples_per_insert=1.9, **{memory: 40})
    assert reader.read().frames == 8400
    write(tmp_path, "learner", 5, 8000, learner__updates=50, charts__updates_per_second=10.0, **{memory: 300})
    write(tmp_path, "replay", 9, 8400, charts__episodic_return=-20.5, charts__environment_frames_per_second=1600.0)
    write(tmp_path, "actor-1", 5, 8000, actor__steps_per_second=200.0, **{memory: 2})
    clock.now = START + 12
    now = reader.read()
    assert (now.frames, now.frames_per_second) == (8400, 1600.0)
    assert (now.updates, now.updates_per_second) == (50, 10.0)
    assert (now.replay_size, now.samples_per_insert) == (2100, 1.9)
    assert (now.training_return, now.elapsed_seconds, now.memory_bytes) == (-20.5, 12.0, 342)
    one = ProgressReader(str(tmp_path), config(processes="one"), clock)
    write(tmp_path, "replay", 10, 8400, **{memory: 50})
    write(tmp_path, "learner", 10, 8000, **{memory: 300})
    assert one.read().memory_bytes == 300, "all are of one process"


def test_best_evaluation_stays_when_a_worse_one_follows(tmp_path: Path) -> None:
    reader = ProgressReader(str(tmp_path), config(), Clock())
    write(tmp_path, "evaluator", 1, 4, eval__episodic_return=14.6, eval__human_normalized_score=1.0, eval__updates=7)
    write(tmp_path, "evaluator", 2, 4, eval__episodic_return=-20.7, eval__human_normalized_score=0.0)
    write(tmp_path, "evaluator", 3, 4, system__resident_memory_bytes=1)
    now = reader.read()
    assert now.latest_evaluation == EvaluationSummary(-20.7, 0.0, None)
    assert now.best_evaluation == EvaluationSummary(14.6, 1.0, 7)


def test_resumed_run_goes_on_from_the_history_but_not_with_its_rates(tmp_path: Path) -> None:
    write(tmp_path, "learner", 90, 4000, learner__updates=70, charts__updates_per_second=9.0)
    write(tmp_path, "replay", 90, 4000, replay__size_transitions=500, charts__environment_frames_per_second=100.0)
    write(tmp_path, "evaluator", 90, 4000, eval__episodic_return=3.0)
    reader = ProgressReader(str(tmp_path), config(total_updates=140), Clock(START + 500))
    now = reader.read()
    assert (now.phase, now.frames, now.updates) == ("starting the replay server", 4000, 70)
    assert (now.updates_per_second, now.frames_per_second, now.replay_size, now.seconds_left) == (0, 0, 0, None)
    assert now.best_evaluation == EvaluationSummary(3.0, None, None)


@pytest.mark.parametrize(("limits", "seconds_left"), [
    ({}, None),
    ({"total_minutes": 2.0}, 120 - 20),
    ({"total_environment_frames": 50_000}, (50_000 - 20_000) / 1000),
    ({"total_updates": 500}, (500 - 400) / 20),
    ({"total_minutes": 2.0, "total_environment_frames": 50_000, "total_updates": 5000}, 30),
    ({"total_minutes": 0.4, "total_environment_frames": 50_000, "total_updates": 1000}, 4),
    ({"total_environment_frames": 5_000}, 0),
])  # fmt: skip
def test_time_left_is_that_of_the_limit_that_comes_first(
    tmp_path: Path, limits: dict[str, float], seconds_left: float | None
) -> None:
    clock = Clock()
    reader = ProgressReader(str(tmp_path), config(**limits), clock)
    for second in range(0, 21, 2):  # the first rate that the learner writes counts the time that it compiled
        rate, minutes = (20.0 if second else 0.01), {"charts__elapsed_minutes": second / 60}
        frames, updates = 1000 * second, 20 * second
        write(tmp_path, "learner", second, frames, learner__updates=updates, charts__updates_per_second=rate, **minutes)
        clock.now = START + second
        left = reader.read().seconds_left
        if second < 5:
            assert left is None  # no guess before it is sound
    assert left == (None if seconds_left is None else pytest.approx(seconds_left))
