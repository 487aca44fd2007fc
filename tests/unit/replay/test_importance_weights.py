"""Importance weights are those of the paper, and finite."""

from __future__ import annotations

import numpy as np

from apex_jax.replay.importance_weights import MIN_PROBABILITY, importance_weights


def test_weights_are_those_of_the_paper_over_the_largest_of_the_batch() -> None:
    probabilities = np.random.default_rng(3).random((3, 8)) + 1e-3
    weights = (1000 * probabilities) ** -0.4
    expected = weights / weights.max(axis=1, keepdims=True)
    np.testing.assert_allclose(importance_weights(probabilities, 0.4), expected, rtol=1e-6)
    assert importance_weights(probabilities, 0.0).tolist() == np.ones((3, 8)).tolist()


def test_weights_of_the_most_extreme_probabilities_are_finite() -> None:
    assert importance_weights(np.array([[MIN_PROBABILITY, 1.0]]), 10.0).tolist() == [[1.0, 0.0]]
    assert importance_weights(np.array([[MIN_PROBABILITY] * 2]), 10.0).tolist() == [[1.0, 1.0]]
