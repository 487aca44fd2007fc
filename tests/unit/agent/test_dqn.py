"""Ape-X DQN with and without its options: whole updates and each equation against NumPy twins, and how it acts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent import losses, munchausen
from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.dqn import make_dqn
from apex_jax.config import Config, NetworkConfig
from tests.rigs import reference, reference_dqn
from tests.rigs.agents import twin_params
from tests.rigs.small_agents import BATCH, VECTORS, batch_of, config, random_batches, random_store

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "munchausen": {"munchausen": True},
    "layer_norm": {"layer_norm": True},
    "quantiles": {"quantiles": 5},
    "quantiles in one stream": {"quantiles": 5, "dueling": False},
    "atoms": {"atoms": 7, "lowest_return": -3.0, "highest_return": 4.0},
    "all": {"munchausen": True, "layer_norm": True, "quantiles": 5},
}
QUICK = ("none", "atoms", "all")


def marked(name: str) -> Any:
    return pytest.param(OPTIONS[name], id=name, marks=() if name in QUICK else pytest.mark.long)


def random_params(dqn: Algorithm) -> Any:
    rng, like = np.random.default_rng(5), jax.eval_shape(dqn.init, jax.random.key(0)).online_params
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), like)


every_option = pytest.mark.parametrize("options", [marked(name) for name in OPTIONS])


# Not with atoms: where the returns beyond their bounds are cut, which an actor, who has the means, cannot know.
@pytest.mark.parametrize("options", [
    pytest.param(OPTIONS[name], id=name, marks=() if name == "none" else pytest.mark.long)
    for name in OPTIONS if name != "atoms"
])  # fmt: skip
def test_initial_priority_of_an_actor_is_that_of_a_learner_with_the_same_parameters(options: dict[str, Any]) -> None:
    settings = config(**options)
    dqn, store, (indices, weights) = make_dqn(settings, VECTORS), random_store(7), random_batches(8, 1)
    state = dqn.init(jax.random.key(0))
    params, batch = jax.tree.map(jnp.copy, state.online_params), batch_of(store, indices[0], weights[0])
    at_t, at_tpk = (
        dqn.act(params, x.reshape(BATCH, 2, 5), np.ones(BATCH, np.float32), jax.random.key(1), 0)
        for x in (batch.observation_t, batch.observation_tpk)
    )
    values = np.asarray(at_t.value), np.asarray(at_tpk.bootstrap_value)
    ours = losses.initial_priority(batch.n_step_return, batch.discount, *values)
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
    params = random_params(dqn)
    observation = jnp.asarray(np.random.default_rng(8).normal(size=(200, 2, 5)), jnp.float32)
    acted = dqn.act(params, observation, jnp.zeros(200), jax.random.key(1), 0)
    exported = jax.jit(dqn.greedy)(params, observation)
    assert exported["q_values"].shape == (200, 3)
    np.testing.assert_array_equal(exported["action"], acted.action)
    np.testing.assert_array_equal(exported["q_values"].argmax(axis=1), acted.action)
    np.testing.assert_allclose(exported["q_values"].max(axis=1), acted.value, rtol=1e-5, atol=1e-6)


def assert_params_equal(params: Any, twin: reference.Arrays) -> None:
    ours = twin_params(params)
    assert ours.keys() == twin.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, twin[name], rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("config", [
    pytest.param(config(), id="paper"),
    pytest.param(config(double_q=False, loss="huber", max_gradient_norm=0.05), id="single_q_huber_clipped"),  # always
    pytest.param(config(quantiles=4, munchausen=True), id="all"),
    pytest.param(config(**OPTIONS["atoms"]), id="atoms"),
    *(pytest.param(config(**options), id="_".join(options), marks=pytest.mark.long) for options in (
        {"munchausen": True}, {"munchausen": True, "loss": "huber"}, {"quantiles": 4},
        {"quantiles": 3, "double_q": False}, {"atoms": 2, "double_q": False})),
])  # fmt: skip
def test_updates_equal_their_numpy_twin(config: Config) -> None:
    dqn, store = make_dqn(config, VECTORS), random_store(3)
    state = dqn.init(jax.random.key(0))
    twin = reference_dqn.Learner(twin_params(state.online_params), twin_params(state.target_params), config)
    for updates in range(1, 8):  # the target network is copied after updates 3 and 6
        indices, weights = random_batches(updates, 1)
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
    params = random_params(dqn)
    observation = jnp.asarray(np.random.default_rng(6).normal(size=(6000, 2, 5)), jnp.float32)
    greedy = dqn.act(params, observation, jnp.zeros(6000), jax.random.key(1), 0)
    np.testing.assert_array_equal(greedy.value, greedy.bootstrap_value)
    random = dqn.act(params, observation, jnp.ones(6000), jax.random.key(1), 0)
    counts = np.bincount(random.action, minlength=3)
    assert (abs(counts - 2000) < 5 * np.sqrt(6000 * (1 / 3) * (2 / 3))).all()  # five standard deviations
    assert (random.value <= random.bootstrap_value).all()
    np.testing.assert_array_equal(random.bootstrap_value, greedy.bootstrap_value)
    both = dqn.act(params, observation, jnp.repeat(jnp.array([0.0, 1.0]), 3000), jax.random.key(1), 0).action
    np.testing.assert_array_equal(both, jnp.where(jnp.arange(6000) < 3000, greedy.action, random.action))
    half = dqn.act(params, observation, jnp.full(6000, 0.5), jax.random.key(1), 0)
    same = float((half.action == greedy.action).mean())
    assert abs(same - (0.5 + 0.5 / 3)) < 5 * np.sqrt(0.25 / 6000)


# Equations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("double_q", [True, False])
def test_target_equals_its_twin(double_q: bool) -> None:
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=20), rng.choice([0.0, 0.97, 0.99], 20), rng.normal(size=(20, 6)), rng.normal(size=(20, 6))
    arguments: Any = (*(x.astype(np.float32) for x in arrays), double_q)
    result = jax.jit(losses.n_step_target, static_argnums=4)(*arguments)
    np.testing.assert_allclose(result, reference.n_step_targets(*arguments), rtol=1e-5, atol=1e-6)


def test_transition_without_error_keeps_a_priority_above_0() -> None:
    np.testing.assert_allclose(losses.priority(jnp.array([0.0, -2.0])), [1e-6, 2.0], rtol=1e-6)
    arrays = [np.array(x, np.float32) for x in ([1, 1], [0.5, 0], [2, 3], [2, 2])]
    initial = losses.initial_priority(*arrays)
    assert initial.dtype == np.float32
    np.testing.assert_allclose(initial, [1e-6, 2.0], rtol=1e-6)  # |1 + 0.5 x 2 - 2| and |1 - 3|


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


@pytest.mark.parametrize("options", [{}, pytest.param({"munchausen": True, "quantiles": 5}, marks=pytest.mark.long)])
def test_normalized_observations_are_those_that_the_network_of_actor_and_learner_sees(options: dict[str, Any]) -> None:
    settings, store, batches = config(**options, normalize_observations=True), random_store(3), random_batches(4, 2)
    dqn, plain = make_dqn(settings, VECTORS), make_dqn(config(**options), VECTORS)
    before = dqn.init(jax.random.key(0))
    network = jax.tree.map(jnp.copy, before.online_params)
    state, output = dqn.update(before, store, *batches, 0.0)  # no parameter changes
    drawn = [batch_of(store, *batch) for batch in zip(*batches, strict=True)]
    seen = np.concatenate([batch.observation_t.reshape(BATCH, -1) for batch in drawn])
    np.testing.assert_allclose(state.moments.mean, seen.mean(axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.moments.variance, seen.var(axis=0), rtol=1e-4)

    def normalized(observation: np.ndarray) -> np.ndarray:
        whole = (observation.reshape(BATCH, -1) - seen.mean(axis=0)) / np.sqrt(seen.var(axis=0) + 1e-5)
        return whole.reshape(BATCH, 2, 5).astype(np.float32)

    stacks, ones = drawn[-1].observation_t.reshape(BATCH, 2, 5), np.ones(BATCH, np.float32)
    ours = dqn.act(dqn.acting_params(state), stacks, ones, jax.random.key(1), 0)
    expected = plain.act(network, normalized(stacks), ones, jax.random.key(1), 0)
    np.testing.assert_allclose(ours.value, expected.value, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(ours.action, expected.action)
    if not options:  # the twin of the others is that of the network as it is
        assert plain.greedy is not None
        q_t, q_tpk = (
            np.asarray(plain.greedy(network, jnp.asarray(normalized(each)))["q_values"])
            for each in (drawn[-1].observation_t, drawn[-1].observation_tpk)
        )
        target = drawn[-1].n_step_return + drawn[-1].discount * q_tpk.max(axis=1)
        td_error = target - q_t[np.arange(BATCH), drawn[-1].action]
        np.testing.assert_allclose(output.priorities[-1], np.abs(td_error), rtol=1e-3, atol=1e-3)
