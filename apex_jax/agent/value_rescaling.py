"""Rescaling of action values (Pohlen et al. 2018, "Observe and Look Further"), for rewards that are not clipped.

    h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x
    G = h(sum_{j<k} gamma^j r_{t+j+1} + gamma^k h^-1(q(S_{t+k}, A*; theta-)))

The network learns h of the returns, which are of similar sizes in all games; TD errors, priorities and the metrics of
losses are in its scale. Values in `Action` and `Algorithm.greedy` are in the scale of the rewards, by h^-1.

Neither function subtracts nearly equal numbers, because float32 would round the difference to 0 for small x. The usual
formula of h^-1, ((sqrt(1 + 4 epsilon (|x| + 1 + epsilon)) - 1) / (2 epsilon))^2 - 1, subtracts such numbers, and then
divides by epsilon.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np

EPSILON = 0.01  # keeps h^-1 Lipschitz continuous

Values = TypeVar("Values", jax.Array, np.ndarray)


def rescaled(x: Values) -> Values:
    """Returns h(x), elementwise."""
    return x / ((abs(x) + 1) ** 0.5 + 1) + EPSILON * x


def unscaled(x: Values) -> Values:
    """Returns h^-1(x), elementwise."""
    root = ((1 + 2 * EPSILON) ** 2 + 4 * EPSILON * abs(x)) ** 0.5
    y = 2 * x / (root + 1 + 2 * EPSILON)  # sign(x) (sqrt(|h^-1(x)| + 1) - 1)
    return y * (abs(y) + 2)
