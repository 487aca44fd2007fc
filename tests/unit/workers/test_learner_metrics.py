"""What a learner writes between two lines of its metrics: means of all updates, the largest priority, rates."""

from __future__ import annotations

import numpy as np
import pytest

from apex_jax.agent.algorithm import UpdateOutput
from apex_jax.links.shards import Batches
from apex_jax.run import metrics
from apex_jax.run.metrics import TAGS
from apex_jax.workers.learner_metrics import LearnerMetrics


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def batches_of(age_seconds: float, samples_per_insert: float) -> Batches:
    empty = np.zeros((1, 0))
    return Batches(empty, empty, samples_per_insert, age_seconds)


def output_of(priorities: list[list[float]], **values: list[float]) -> UpdateOutput:
    metrics = {f"losses/{name}": np.array(value) for name, value in values.items()}
    return UpdateOutput(np.array(priorities), metrics)  # type: ignore[arg-type]


def test_each_tag_is_the_mean_of_all_updates_since_the_last_line_and_is_known() -> None:
    learner = LearnerMetrics()
    learner.add(batches_of(2.0, 7.5), output_of([[1.0, 2.0], [3.0, 6.0]], q_values=[1.0, 3.0]))
    learner.add(batches_of(4.0, 8.5), output_of([[0.0, 0.0]], q_values=[8.0]))
    values = learner.take(3)
    assert values["losses/q_values"] == pytest.approx(4.0)
    assert values["losses/priority_mean"] == pytest.approx(2.0)
    assert values["losses/priority_max"] == 6.0
    assert values["replay/sample_age_seconds"] == pytest.approx(3.0)
    assert values["replay/samples_per_insert"] == 8.5, "the newest"
    assert set(values) <= set(TAGS)


def test_line_without_updates_has_only_rates() -> None:
    learner = LearnerMetrics()
    assert set(learner.take(0)) == {"charts/updates_per_second", "learner/updates", "learner/wait_seconds_share"}
    learner.add(batches_of(2.0, 7.5), output_of([[9.0]], q_values=[1.0]))
    learner.take(1)
    learner.add(batches_of(2.0, 7.5), output_of([[1.0]], q_values=[5.0]))
    values = learner.take(2)
    assert (values["losses/q_values"], values["losses/priority_max"]) == (5.0, 1.0)


def test_rates_are_of_the_time_between_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(metrics.RateMeter.__init__, "__defaults__", (clock,))
    learner = LearnerMetrics()
    learner.take(100)
    clock.seconds, learner.waited_seconds = 10.0, 2.5
    values = learner.take(400)
    assert values["charts/updates_per_second"] == pytest.approx(30.0)
    assert values["learner/wait_seconds_share"] == pytest.approx(0.25)
    clock.seconds, learner.waited_seconds = 11.0, 9.0
    assert learner.take(400)["learner/wait_seconds_share"] == 1.0, "a wait that began before the last line counts here"
