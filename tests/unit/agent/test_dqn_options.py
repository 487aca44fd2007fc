"""Options of Ape-X DQN beyond the paper: Munchausen targets, quantiles, rescaled values, and several together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent import munchausen
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.losses import initial_priority
from apex_jax.agent.quantiles import quantile_losses
from apex_jax.agent.value_rescaling import rescaled, unscaled
from tests.rigs import reference_dqn
from tests.rigs.small_agents import BATCH, VECTORS, batch_of, config, random_batches, random_store

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "munchausen": {"munchausen": True},
    "value_rescaling": {"value_rescaling": True},
    "layer_norm": {"layer_norm": True},
    "quantiles": {"quantiles": 5},
    "quantiles in one stream": {"quantiles": 5, "dueling": False},
    "all but quantiles": {"munchausen": True, "value_rescaling": True, "layer_norm": True},
    "all": {"munchausen": True, "value_rescaling": True, "layer_norm": True, "quantiles": 5},
}
QUICK = ("none", "all but quantiles", "all")


def marked(name: str) -> Any:
    return pytest.param(OPTIONS[name], id=name, marks=() if name in QUICK else pytest.mark.long)


every_option = pytest.mark.parametrize("options", [marked(name) for name in OPTIONS])


# "all" has rescaled quantiles: the mean of their h is not h of their mean, which is all that an actor has.
@pytest.mark.parametrize("options", [marked(name) for name in OPTIONS if name != "all"])
def test_initial_priority_of_an_actor_is_that_of_a_learner_with_the_same_parameters(options: dict[str, Any]) -> None:
    rng, settings = np.random.default_rng(7), config(**options)
    dqn, store, (indices, weights) = make_dqn(settings, VECTORS), random_store(rng), random_batches(rng, 1)
    state = dqn.init(jax.random.key(0))
    params, batch = jax.tree.map(jnp.copy, state.online_params), batch_of(store, indices[0], weights[0])
    at_t, at_tpk = (
        dqn.act(params, x.reshape(BATCH, 2, 5), np.ones(BATCH, np.float32), jax.random.key(1), 0)
        for x in (batch.observation_t, batch.observation_tpk)
    )
    values = np.asarray(at_t.value), np.asarray(at_tpk.bootstrap_value)
    is_rescaled = settings.algorithm.value_rescaling
    ours = initial_priority(batch.n_step_return, batch.discount, *values, value_rescaling=is_rescaled)
    action = np.zeros(store.columns["action"].size, np.int32)
    action[indices[0]] = at_t.action
    for start in indices[0]:
        same = np.flatnonzero(indices[0] == start)
        ours[same] = ours[same[-1]]  # drawn twice: the store has the last action
    store.columns["action"] = jnp.asarray(action.reshape(store.columns["action"].shape))
    _, output = dqn.update(state, store, indices, weights, 1.0)
    np.testing.assert_allclose(output.priorities[0], ours, rtol=1e-4, atol=1e-5)


@every_option
def test_greedy_acting_takes_the_largest_of_the_exported_values_and_returns_it(options: dict[str, Any]) -> None:
    dqn = make_dqn(config(**options), VECTORS)
    assert dqn.greedy is not None
    params = jax.tree.map(lambda x: 3 * x, dqn.init(jax.random.key(0)).online_params)
    observation = jnp.asarray(np.random.default_rng(8).normal(size=(200, 2, 5)), jnp.float32)
    acted = dqn.act(params, observation, jnp.zeros(200), jax.random.key(1), 0)
    exported = jax.jit(dqn.greedy)(params, observation)
    assert exported["q_values"].shape == (200, 3)
    np.testing.assert_array_equal(exported["action"], acted.action)
    np.testing.assert_array_equal(exported["q_values"].argmax(axis=1), acted.action)
    np.testing.assert_allclose(exported["q_values"].max(axis=1), acted.value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0])  # from a policy that is nearly uniform to one that is nearly greedy
def test_bonus_and_soft_value_equal_their_twin(scale: float) -> None:
    q = np.random.default_rng(1).normal(scale=scale, size=(20, 6)).astype(np.float32)
    bonuses = [[reference_dqn.munchausen_bonus(row, action) for action in range(6)] for row in q.astype(np.float64)]
    np.testing.assert_allclose(jax.jit(munchausen.bonus)(q), bonuses, rtol=1e-4, atol=1e-6)
    values = [reference_dqn.soft_value(row, row) for row in q.astype(np.float64)]
    np.testing.assert_allclose(jax.jit(munchausen.soft_value)(q), values, rtol=1e-5, atol=1e-6)


def test_actions_far_below_the_best_get_the_least_bonus_and_do_not_change_the_value() -> None:
    q = jnp.array([[7.0, 6.5, -300.0], [1e9, -1e9, 0.0]])
    np.testing.assert_allclose(munchausen.bonus(q), [[0, -0.45, -0.9], [0, -0.9, -0.9]], rtol=1e-5)
    np.testing.assert_allclose(munchausen.soft_value(q), [7, 1e9], rtol=1e-6)


def test_weighted_loss_and_its_gradient_equal_their_twin() -> None:
    rng = np.random.default_rng(1)
    z, target, weight = (rng.normal(scale=2, size=size).astype(np.float32) for size in ((6, 3, 5), (6, 5), 6))
    action = rng.integers(0, 3, 6)

    def loss(z: jax.Array) -> jax.Array:
        return jnp.mean(weight * quantile_losses(z[np.arange(6), action], jnp.asarray(target)))

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(z))
    twin_value, twin_gradient, _ = reference_dqn.quantile_loss_and_gradient(z, action, target, weight)
    np.testing.assert_allclose(value, twin_value, rtol=1e-5)
    np.testing.assert_allclose(gradient, twin_gradient, rtol=1e-4, atol=1e-7)


def test_descent_finds_the_quantiles_of_the_targets() -> None:
    target = jnp.tile(jnp.arange(1000.0, 1004.0), (1, 1))  # so far apart that Huber's loss is that of quantiles
    z = jnp.zeros((1, 4)) + 1001.5
    step = jax.jit(lambda z: z - 0.05 * jax.grad(lambda z: quantile_losses(z, target).sum())(z))
    for _ in range(2000):
        z = step(z)
    assert (np.diff(z[0]) > 0).all()
    np.testing.assert_allclose(z[0], [1000, 1001, 1002, 1003], atol=0.6)


SIZES = 10.0 ** np.arange(-8, 13)
ANY = np.concatenate([-SIZES[::-1], [0.0], SIZES]).astype(np.float32)  # in order


@pytest.fixture(params=["numpy", "jitted"])
def of(request: pytest.FixtureRequest) -> Callable[[Callable, Any], Any]:
    """Applies a function to an array of NumPy, or jitted."""
    return lambda function, x: (jax.jit(function) if request.param == "jitted" else function)(x)


def test_rescaling_and_its_inverse_equal_the_formulas_of_the_paper(of: Callable) -> None:
    np.testing.assert_allclose(of(rescaled, ANY), [reference_dqn.h(float(x)) for x in ANY], rtol=1e-6, atol=1e-15)
    assert of(rescaled, ANY).dtype == of(unscaled, ANY).dtype == np.float32
    exact = [reference_dqn.inverse_h(float(x)) for x in ANY]  # the formula loses 1e-14 even in float64
    np.testing.assert_allclose(of(unscaled, ANY), exact, rtol=1e-6, atol=1e-12)


def test_rescaling_and_then_its_inverse_return_values_of_any_size(of: Callable) -> None:
    np.testing.assert_allclose(of(unscaled, of(rescaled, ANY)), ANY, rtol=1e-6, atol=0)
    np.testing.assert_allclose(of(rescaled, of(unscaled, ANY)), ANY, rtol=1e-6, atol=0)
