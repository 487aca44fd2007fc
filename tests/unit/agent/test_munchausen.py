"""The policy of Munchausen targets, its bonus and its soft value: worked out by hand, and against their NumPy twin."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent import munchausen
from tests.rigs import reference_dqn


@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0])  # from a policy that is nearly uniform to one that is nearly greedy
def test_bonus_and_soft_value_equal_their_twin(scale: float) -> None:
    q = np.random.default_rng(1).normal(scale=scale, size=(20, 6)).astype(np.float32)
    bonuses = [[reference_dqn.munchausen_bonus(row, action) for action in range(6)] for row in q.astype(np.float64)]
    np.testing.assert_allclose(jax.jit(munchausen.bonus)(q), bonuses, rtol=1e-4, atol=1e-6)
    values = [reference_dqn.soft_value(row, row) for row in q.astype(np.float64)]
    np.testing.assert_allclose(jax.jit(munchausen.soft_value)(q), values, rtol=1e-5, atol=1e-6)


def test_two_equal_actions_share_the_bonus_and_add_their_entropy_to_the_value() -> None:
    q = jnp.array([[5.0, 5.0]])
    np.testing.assert_allclose(munchausen.bonus(q), [[-0.9 * 0.03 * math.log(2)] * 2], rtol=1e-5)
    np.testing.assert_allclose(munchausen.soft_value(q), [5 + 0.03 * math.log(2)], rtol=1e-6)


def test_actions_far_below_the_best_get_the_least_bonus_and_do_not_change_the_value() -> None:
    q = jnp.array([[7.0, 6.5, -300.0], [1e9, -1e9, 0.0]])
    np.testing.assert_allclose(munchausen.bonus(q), [[0, -0.45, -0.9], [0, -0.9, -0.9]], rtol=1e-5)
    np.testing.assert_allclose(munchausen.soft_value(q), [7, 1e9], rtol=1e-6)


def test_the_soft_value_is_the_soft_maximum_of_the_q_values() -> None:
    q = np.random.default_rng(2).normal(scale=0.1, size=(20, 6)).astype(np.float32)
    maximum = 0.03 * jax.nn.logsumexp(q / 0.03, axis=-1)
    np.testing.assert_allclose(munchausen.soft_value(jnp.asarray(q)), maximum, rtol=1e-5, atol=1e-6)
