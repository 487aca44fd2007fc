"""Statistics over runs: interquartile mean and bootstrap interval."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apex_jax.plotting.statistics import bootstrap_interval, interquartile_mean


@pytest.mark.parametrize(
    ("scores", "mean"),
    [
        ([5.0], 5.0),
        ([1.0, 3.0], 2.0),
        ([0.0, 6.0, 60.0], 0 / 6 + 6 * 4 / 6 + 60 / 6),
        ([100.0, 1.0, 2.0, -50.0], 1.5),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 700.0], 3.5),
    ],
)
def test_interquartile_mean_is_that_of_the_middle_half(scores: list[float], mean: float) -> None:
    assert interquartile_mean(np.array(scores)) == pytest.approx(mean)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_interquartile_mean_is_within_the_scores_and_independent_of_their_order(scores: list[float]) -> None:
    mean = interquartile_mean(np.array(scores))
    assert min(scores) - 1e-6 <= mean <= max(scores) + 1e-6
    assert interquartile_mean(np.array(scores[::-1])) == mean


def test_interval_contains_the_statistic_and_narrows_with_more_runs() -> None:
    rng = np.random.default_rng(1)
    widths = []
    for size in (5, 50):
        scores = rng.normal(size=(size, 1))
        low, high = bootstrap_interval([scores], interquartile_mean, np.random.default_rng(2))
        assert low[0] < interquartile_mean(scores)[0] < high[0]
        widths.append(high[0] - low[0])
    assert widths[1] < widths[0] / 2


def test_bootstrap_resamples_runs_within_their_game() -> None:
    strata = [np.zeros(4), np.full(4, 10.0)]
    low, high = bootstrap_interval(strata, interquartile_mean, np.random.default_rng(0))
    assert (float(low), float(high)) == (5.0, 5.0)
