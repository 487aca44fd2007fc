"""Statistics for few runs (Agarwal et al. 2021): interquartile mean and stratified bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2_000
CONFIDENCE = 0.95
FEWEST_RUNS = 3  # of each game; a bootstrap interval of two is their range


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Returns the mean of the middle half along axis 0; a score that a quartile divides counts in part.

    This defines it also if the number of runs is not divisible by four: of three runs the middle one has weight 2/3,
    the others 1/6 each.
    """
    edges = np.linspace(0, 1, len(scores) + 1)
    weights = np.diff(np.clip(edges, 0.25, 0.75)) * 2
    return np.tensordot(weights, np.sort(scores, axis=0), axes=1)


def bootstrap_interval(
    strata: Sequence[np.ndarray], statistic: Callable[[np.ndarray], np.ndarray], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and the upper end of the percentile interval of `statistic`, each with the shape of its result.

    `strata`: for each game the scores of its runs, float[runs, ...]; runs are resampled with replacement within their
    game. With three runs of each game, an interval is only a rough indication.
    """
    values = []
    for _ in range(RESAMPLES):
        drawn = [scores[rng.integers(len(scores), size=len(scores))] for scores in strata]
        values.append(statistic(np.concatenate(drawn)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail], axis=0)
    return low, high
