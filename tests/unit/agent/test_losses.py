"""The equations against their NumPy twins, jitted and not."""

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


@pytest.mark.parametrize("target", [
    lambda q: losses.n_step_target(jnp.ones(2), jnp.ones(2), q, 2 * q, True),
    lambda q: losses.policy_target(jnp.ones(2), jnp.ones(2), q),
])  # fmt: skip
def test_no_gradient_flows_through_a_target(target: Callable[[jax.Array], jax.Array]) -> None:
    gradient = jax.grad(lambda q: target(q).sum())(jnp.array([[1.0, 2.0], [4.0, 3.0]]))
    np.testing.assert_array_equal(gradient, np.zeros((2, 2)))


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
