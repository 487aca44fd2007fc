"""The options of Ape-X DQN that the paper does not have: what holds for each of them, and for several together."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.losses import initial_priority
from tests.rigs.dqn import BATCH, VECTORS, batch_of, config, random_batches, random_store

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


@pytest.mark.long
@every_option
def test_bfloat16_activations_make_float32_priorities_near_those_of_float32(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(9)
    store, batches, settings = random_store(rng), random_batches(rng, 2), config(**options)
    dqns = [make_dqn(settings, VECTORS, dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    states = [dqn.init(jax.random.key(0)) for dqn in dqns]
    (_, single), (state, half) = (
        dqn.update(state, store, *batches, 1.0) for dqn, state in zip(dqns, states, strict=True)
    )
    assert half.priorities.dtype == jnp.float32
    np.testing.assert_allclose(half.priorities, single.priorities, rtol=0.05, atol=0.05)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.online_params)} == {jnp.dtype(jnp.float32)}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.online_params, half)))


@pytest.mark.long
@every_option
def test_acting_and_learning_are_traced_once_per_shape(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(10)
    dqn, store = make_dqn(config(**options), VECTORS), random_store(rng)
    state = dqn.init(jax.random.key(0))
    for step in range(3):
        dqn.act(state.online_params, np.zeros((4, 2, 5), np.float32), np.zeros(4, np.float32), jax.random.key(1), step)
        state, _ = dqn.update(state, store, *random_batches(rng, 2), 1 / (1 + step))
    assert dqn.act._cache_size() == dqn.update._cache_size() == 1  # type: ignore[attr-defined]
