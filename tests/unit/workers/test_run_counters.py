"""A run's counters go on across restarts of its learner, its limits are reached, and the learning rate falls."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apex_jax.config import Config, EnvironmentConfig, EvaluatorConfig, LearnerConfig
from apex_jax.run.checkpoint import Progress
from apex_jax.transport.messages import NO_RETURN
from apex_jax.types import MAX_ENVIRONMENT_STEPS
from apex_jax.workers.run_counters import RunCounters


def test_the_step_size_falls_with_the_limit_that_is_nearest() -> None:
    falling = LearnerConfig(final_learning_rate_share=0.2, learning_rate_decay_start=0.0)
    counters = counters_of(learner=falling, total_updates=1_000, total_environment_frames=8_000, total_minutes=1e6)
    shares = []
    for counters.updates, frames in ((0, 0), (500, 0), (500, 6_000), (1_000, 6_000), (1_008, 6_000)):
        counters.environment_steps = frames // 4
        shares.append(counters.learning_rate_share())
    assert shares == pytest.approx([1.0, 0.6, 0.4, 0.2, 0.2])


NOTHING = Progress(0, 0, 0.0, 0, "key", "architecture")


def counters_of(progress: Progress = NOTHING, **settings: Any) -> RunCounters:
    environment = EnvironmentConfig(frame_skip=4)
    return RunCounters(Config(environment=environment).replace(**settings), progress)


@given(
    counts=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1000)), max_size=40), restart=st.integers(0, 40)
)
def test_steps_are_the_growth_of_each_replays_count_also_across_a_restart(
    counts: list[tuple[str, int]], restart: int
) -> None:
    counters, last, total = counters_of(), dict.fromkeys("abc", 0), 0
    for number, (replay_id, steps) in enumerate(counts):
        if number == restart:
            counters = counters_of(counters.progress(1, "run"))
        counters.count_steps(replay_id, steps)
        total += max(0, steps - last[replay_id])
        last[replay_id] = steps
        assert counters.environment_steps == total
        assert counters.environment_frames == 4 * total


def test_servers_that_report_too_many_steps_leave_a_count_that_can_be_sent() -> None:
    counters = counters_of()
    for replay_id in "ab":
        counters.count_steps(replay_id, MAX_ENVIRONMENT_STEPS)
    assert counters.environment_steps == MAX_ENVIRONMENT_STEPS


def test_restart_continues_from_the_saved_progress_of_every_replay() -> None:
    saved = Progress(70, 5000, 600.0, 9, "key", "architecture", "", (("a", 3000), ("b", 2000)))
    counters = counters_of(saved)
    counters.first_update_seconds = time.monotonic() - 30.0
    assert (counters.updates, counters.environment_steps) == (70, 5000)
    assert 630.0 <= counters.elapsed_seconds() < 690.0
    counters.updates += 1
    counters.count_steps("b", 2500)
    progress = counters.progress(10, "0" * 16)
    assert progress._replace(elapsed_seconds=0.0) == Progress(
        71, 5500, 0.0, 10, "key", "architecture", "0" * 16, (("a", 3000), ("b", 2500))
    )
    assert progress.elapsed_seconds >= 630.0


def test_time_of_the_run_passes_from_the_first_update_of_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, saved = 1_000.0, NOTHING
    monkeypatch.setattr("time.monotonic", lambda: clock)
    for _ in range(2):
        counters = counters_of(saved, total_minutes=5.0)
        clock += 400.0  # until the replay is full and the learner compiled
        assert counters.elapsed_seconds() == saved.elapsed_seconds
        counters.first_update_seconds = clock
        clock += 90.0
        assert counters.elapsed_seconds() == saved.elapsed_seconds + 90.0
        assert counters.limit_reached() is None
        saved = counters.progress(1, "run")


@pytest.mark.parametrize(("settings", "text"), [
    ({}, None),
    ({"total_updates": 71}, None),
    ({"total_updates": 70}, "70 updates"),
    ({"total_environment_frames": 20_001}, None),
    ({"total_environment_frames": 20_000}, "20000 environment frames"),
    ({"total_minutes": 12.0}, None),
    ({"total_minutes": 10.0}, "10.0 minutes"),
    ({"total_updates": 71, "total_environment_frames": 20_000, "total_minutes": 10.0}, "20000 environment frames"),
])  # fmt: skip
def test_limit_is_reached_at_its_value_and_unset_limits_never(settings: dict[str, Any], text: str | None) -> None:
    saved = Progress(70, 5000, 600.0, 9, "key", "architecture")
    assert counters_of(saved, **{"total_updates": 0, "total_environment_frames": 0, **settings}).limit_reached() == text


def test_an_evaluation_with_the_return_to_stop_at_ends_the_run() -> None:
    saved = Progress(70, 5000, 600.0, 9, "key", "architecture")
    counters = counters_of(saved, evaluator=EvaluatorConfig(stop_at_return=-1.5), total_updates=0)
    assert counters.limit_reached(NO_RETURN) is None
    assert counters.limit_reached(-9.0) is None
    assert counters.limit_reached(-1.25) == "a mean return of -1.25 in an evaluation"
    assert counters_of(saved, total_updates=0).limit_reached(5.0) is None, "0 = never"


@given(
    start=st.floats(0.0, 0.99),
    final=st.floats(0.0, 1.0),
    updates=st.lists(st.integers(0, 2000), min_size=2, max_size=9),
)
def test_share_of_the_learning_rate_never_rises_and_ends_at_its_final_value(
    start: float, final: float, updates: list[int]
) -> None:
    learner = LearnerConfig(learning_rate_decay_start=start, final_learning_rate_share=final)
    counters = counters_of(learner=learner, total_updates=1000)
    shares = []
    for counters.updates in sorted(updates):
        shares.append(counters.learning_rate_share())
        if counters.updates <= 1000 * start:
            assert shares[-1] == 1.0
        if counters.updates >= 1000:
            assert shares[-1] == pytest.approx(final)
    assert shares == sorted(shares, reverse=True)
    assert all(final - 1e-9 <= share <= 1.0 for share in shares)
    endless = counters_of(learner=learner, total_updates=0, total_environment_frames=0)
    endless.updates = 1_000_000
    assert endless.learning_rate_share() == pytest.approx(1.0)
