"""Importance weights of prioritized draws."""

from __future__ import annotations

import numpy as np

MIN_PROBABILITY = 1e-300  # of a draw, so that no weight divides by 0


def importance_weights(probabilities: np.ndarray, beta: float) -> np.ndarray:
    """Returns float32[K, B], w_i = (N P(i))^-beta / max_j w_j over each batch (Schaul et al. 2016, section 3.4).

    `probabilities`: float64[K, B], P(i), or a multiple of it. N cancels: w_i = (min_j P(j) / P(i))^beta, which cannot
    overflow.
    """
    weights: np.ndarray = (probabilities.min(axis=1, keepdims=True) / probabilities) ** beta
    return weights.astype(np.float32)
