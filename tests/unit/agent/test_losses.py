"""The equations, against tables worked out by hand and against their NumPy twins, jitted and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent import losses
from tests.rigs import reference


@pytest.fixture(params=[True, False], ids=["jitted", "not_jitted"])
def maybe_jit(request: pytest.FixtureRequest) -> Callable:
    def wrap(function: Callable, **options: Any) -> Callable:
        return jax.jit(function, **options) if request.param else function

    return wrap


@pytest.mark.parametrize(("double_q", "expected"), [(True, [1 + 0.5 * 10, -1.0]), (False, [1 + 0.5 * 30, -1.0])])
def test_online_network_chooses_and_target_network_values_the_action_in_double_q(
    maybe_jit: Callable, double_q: bool, expected: list[float]
) -> None:
    online = jnp.array([[5.0, 9.0, 1.0], [0.0, 1.0, 2.0]])  # likes action 1, and action 2
    target = jnp.array([[20.0, 10.0, 30.0], [7.0, 8.0, 9.0]])  # largest at action 2 both times
    n_step_target = maybe_jit(losses.n_step_target, static_argnums=4)
    result = n_step_target(jnp.array([1.0, -1.0]), jnp.array([0.5, 0.0]), online, target, double_q)
    np.testing.assert_array_equal(result, expected)  # discount 0: nothing but the return, whatever the q-values


@pytest.mark.parametrize("double_q", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_target_equals_its_twin(maybe_jit: Callable, double_q: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arguments = (
        rng.normal(size=20),
        rng.choice([0.0, 0.97, 0.99], 20),
        rng.normal(size=(20, 6)),
        rng.normal(size=(20, 6)),
    )
    singles = [x.astype(np.float32) for x in arguments]
    result = maybe_jit(losses.n_step_target, static_argnums=4)(*singles, double_q)
    n_step_return, discount, online_q, target_q = singles
    twin = reference.n_step_targets(n_step_return, discount, online_q, target_q, double_q)
    np.testing.assert_allclose(result, twin, rtol=1e-5, atol=1e-6)


def test_no_gradient_flows_through_the_target() -> None:
    def total(q: jax.Array) -> jax.Array:
        return losses.n_step_target(jnp.ones(2), jnp.ones(2), q, 2 * q, True).sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.array([[1.0, 2.0], [4.0, 3.0]])), np.zeros((2, 2)))


@pytest.mark.parametrize(("q_target_tpk", "expected"), [
    ([[10.0, 20.0, 30.0]], [1 + 0.5 * 10, -1.0, 2 + 0.25 * 30]),
    ([[10.0, 20.0, 30.0], [12.0, -5.0, -8.0]], [1 + 0.5 * 10, -1.0, 2 + 0.25 * -8]),  # the smaller value of each
])  # fmt: skip
def test_policy_target_is_the_return_and_the_discounted_smallest_value(
    maybe_jit: Callable, q_target_tpk: list[list[float]], expected: list[float]
) -> None:
    n_step_return, discount = jnp.array([1.0, -1.0, 2.0]), jnp.array([0.5, 0.0, 0.25])
    result = maybe_jit(losses.policy_target)(n_step_return, discount, jnp.array(q_target_tpk))
    np.testing.assert_array_equal(result, expected)


def test_no_gradient_flows_through_the_policy_target() -> None:
    def total(q: jax.Array) -> jax.Array:
        return losses.policy_target(jnp.ones(2), jnp.ones(2), q).sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.array([[1.0, 2.0], [4.0, 3.0]])), np.zeros((2, 2)))


@pytest.mark.parametrize(("clip", "expected"), [
    (1.0, [[-0.25, 0.5], [-0.5, 0.0]]),
    (0.5, [[-0.25, 0.25], [-0.25, 0.0]]),  # each element, not the norm
    (0.0, [[-0.25, 1.5], [-1.0, 0.0]]),  # never
])  # fmt: skip
def test_policy_descends_against_the_clipped_action_gradient_over_the_batch_size(
    maybe_jit: Callable, clip: float, expected: list[list[float]]
) -> None:
    dq_da = jnp.array([[0.5, -3.0], [2.0, 0.0]])
    np.testing.assert_array_equal(maybe_jit(losses.policy_descent, static_argnums=1)(dq_da, clip), expected)


@pytest.mark.parametrize(("form", "expected"), [
    ("squared", (1 * 0.125 + 0.5 * 4.5 + 0 * 50) / 3),
    ("huber", (1 * 0.125 + 0.5 * 2.5 + 0 * 9.5) / 3),  # quadratic up to 1, then |delta| - 1/2
])  # fmt: skip
def test_loss_is_the_mean_of_weighted_losses(maybe_jit: Callable, form: str, expected: float) -> None:
    td_error, weight = jnp.array([0.5, -3.0, 10.0]), jnp.array([1.0, 0.5, 0.0])
    loss = maybe_jit(losses.weighted_loss, static_argnums=2)(td_error, weight, form)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("form", ["squared", "huber"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_gradient_and_priorities_equal_their_twin(maybe_jit: Callable, form: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, target, weight = (rng.normal(scale=2, size=s).astype(np.float32) for s in ((20, 6), 20, 20))
    weight = np.abs(weight)
    action = rng.integers(0, 6, 20).astype(np.int32)

    def loss(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        td_error = jnp.asarray(target) - losses.select_action_value(q, jnp.asarray(action))
        return losses.weighted_loss(td_error, jnp.asarray(weight), form), losses.priority(td_error)

    (value, priority), gradient = maybe_jit(jax.value_and_grad(loss, has_aux=True))(jnp.asarray(q))
    twin_value, twin_gradient, twin_priority = reference.loss_and_gradient(q, action, target, weight, form)
    np.testing.assert_allclose(value, twin_value, rtol=1e-5)
    np.testing.assert_allclose(gradient, twin_gradient, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(priority, twin_priority, rtol=1e-5, atol=1e-6)


def test_transition_without_error_keeps_a_priority_above_0(maybe_jit: Callable) -> None:
    np.testing.assert_allclose(maybe_jit(losses.priority)(jnp.array([0.0, -2.0])), [1e-6, 2.0], rtol=1e-6)
    arrays = [np.array(x, np.float32) for x in ([1, 1], [0.5, 0], [2, 3], [2, 2])]
    initial = losses.initial_priority(*arrays)
    assert initial.dtype == np.float32
    np.testing.assert_allclose(initial, [1e-6, 2.0], rtol=1e-6)  # |1 + 0.5 x 2 - 2| and |1 - 3|
