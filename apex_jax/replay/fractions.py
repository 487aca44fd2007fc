"""Draws from several replay servers: each server's part of a batch, and the importance weights.

Server s holds transitions with a sum of priorities^alpha of T_s, and draws one with probability p_i^alpha / T_s. A
batch takes a fraction c_s of its transitions from server s, so that P(i) = c_s p_i^alpha / T_s. With c_s = T_s / sum T
it is p_i^alpha / sum T, as of one server that holds everything.
"""

from __future__ import annotations

import numpy as np

MIN_PROBABILITY = 1e-300  # of a draw: a fraction of it is still above 0, so that no weight divides by 0
ROUNDED_TO = 9  # decimal places of cumulative counts, because errors could put them just below whole numbers


def fractions_of(totals: np.ndarray, groups: int = 1) -> np.ndarray:
    """Returns float64[S], the fraction of each server in a batch, for sums of priorities^alpha float64[S].

    The servers, in their order, form `groups` of equal size, such as one for each device. All groups get the same
    fraction, which a group's servers share in proportion to their totals. No group may be without priorities.
    """
    of_groups = totals.reshape(groups, -1)
    fractions: np.ndarray = (of_groups / of_groups.sum(axis=1, keepdims=True) / groups).ravel()
    return fractions


def counts_of(fractions: np.ndarray, batch_size: int, uniforms: np.ndarray) -> np.ndarray:
    """Returns int32[K, S], how many transitions each server gives to each batch; every row sums up to `batch_size`.

    Each count is `batch_size` x fraction, rounded down or up: systematic sampling with one number of `uniforms`
    float64[K], each uniform in [0, 1), for a batch. The expectation of a count is exactly `batch_size` x fraction.
    """
    ends = np.round(np.cumsum(fractions) * batch_size, ROUNDED_TO)
    ends[-1] = batch_size
    taken = np.floor(ends + uniforms[:, None]).astype(np.int32)
    return np.diff(taken, axis=1, prepend=np.int32(0))


def importance_weights(probabilities: np.ndarray, beta: float) -> np.ndarray:
    """Returns float32[K, B], w_i = (N P(i))^-beta / max_j w_j over each batch (Schaul et al. 2016, section 3.4).

    `probabilities`: float64[K, B], P(i), or a multiple of it. N cancels: w_i = (min_j P(j) / P(i))^beta, which cannot
    overflow.
    """
    weights: np.ndarray = (probabilities.min(axis=1, keepdims=True) / probabilities) ** beta
    return weights.astype(np.float32)
