"""Ape-X DQN: whole updates against a NumPy twin, and how it explores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent.dqn import make_dqn
from apex_jax.config import Config, NetworkConfig
from tests.rigs import reference, reference_dqn
from tests.rigs.agents import twin_params
from tests.rigs.small_agents import VECTORS, batch_of, config, random_batches, random_store


def assert_params_equal(params: Any, twin: reference.Arrays) -> None:
    ours = twin_params(params)
    assert ours.keys() == twin.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, twin[name], rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("config", [
    pytest.param(config(), id="paper"),
    pytest.param(config(double_q=False, loss="huber"), id="single_q_huber"),
    pytest.param(config(max_gradient_norm=0.05), id="clipped"),  # every gradient here is larger
    pytest.param(config(quantiles=4, munchausen=True, value_rescaling=True), id="all"),
    *(pytest.param(config(**options), id="_".join(options), marks=pytest.mark.long) for options in (
        {"munchausen": True}, {"value_rescaling": True}, {"munchausen": True, "value_rescaling": True, "loss": "huber"},
        {"quantiles": 4}, {"quantiles": 3, "double_q": False})),
])  # fmt: skip
def test_updates_equal_their_numpy_twin(config: Config) -> None:
    rng = np.random.default_rng(3)
    dqn, store = make_dqn(config, VECTORS), random_store(rng)
    state = dqn.init(jax.random.key(0))
    twin = reference_dqn.Learner(twin_params(state.online_params), twin_params(state.target_params), config)
    for updates in range(1, 8):  # the target network is copied after updates 3 and 6
        indices, weights = random_batches(rng, 1)
        share = 1 - updates / 10  # of the learning rate
        state, output = dqn.update(state, store, indices, weights, share)
        priorities, loss, q_value, norm = twin.update(batch_of(store, indices[0], weights[0]), share)
        assert int(state.updates) == updates
        np.testing.assert_allclose(output.priorities[0], priorities, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(output.metrics["losses/td_loss"][0], loss, rtol=1e-4)
        np.testing.assert_allclose(output.metrics["losses/q_values"][0], q_value, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(output.metrics["losses/gradient_norm"][0], norm, rtol=1e-4)
        assert_params_equal(state.online_params, twin.online)
        assert_params_equal(state.target_params, twin.target)


@pytest.mark.parametrize("dueling", [True, False])
def test_epsilon_0_is_greedy_and_epsilon_1_is_uniform_for_any_network(dueling: bool) -> None:
    network = NetworkConfig(channels=(), kernel_sizes=(), strides=(), hidden_units=8, dueling=dueling)
    dqn = make_dqn(Config(network=network), VECTORS)
    params = dqn.init(jax.random.key(0)).online_params
    observation = jnp.asarray(np.random.default_rng(6).normal(size=(6000, 2, 5)), jnp.float32)
    greedy = dqn.act(params, observation, jnp.zeros(6000), jax.random.key(1), 0)
    np.testing.assert_array_equal(greedy.value, greedy.bootstrap_value)
    random = dqn.act(params, observation, jnp.ones(6000), jax.random.key(1), 0)
    counts = np.bincount(random.action, minlength=3)
    assert (abs(counts - 2000) < 5 * np.sqrt(6000 * (1 / 3) * (2 / 3))).all()  # five standard deviations
    assert (random.value <= random.bootstrap_value).all()
    np.testing.assert_array_equal(random.bootstrap_value, greedy.bootstrap_value)
    half = dqn.act(params, observation, jnp.full(6000, 0.5), jax.random.key(1), 0)
    same = float((half.action == greedy.action).mean())
    assert abs(same - (0.5 + 0.5 / 3)) < 5 * np.sqrt(0.25 / 6000)


def test_every_environment_explores_at_its_own_epsilon() -> None:
    dqn = make_dqn(config(), VECTORS)
    params = dqn.init(jax.random.key(0)).online_params
    observation = jnp.zeros((100, 2, 5)).at[50:].set(1.0)
    epsilon = jnp.repeat(jnp.array([0.0, 1.0]), 50)
    output = dqn.act(params, observation, epsilon, jax.random.key(2), 0)
    assert len(set(output.action[:50].tolist())) == 1
    assert set(output.action[50:].tolist()) == {0, 1, 2}
