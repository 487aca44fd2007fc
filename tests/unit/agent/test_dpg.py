"""Ape-X DPG: whole updates against a NumPy twin, acting, what actors get, and moments of observations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.dpg import DPGState, make_dpg
from apex_jax.agent.moments import EPSILON, LARGEST_TOTAL, add_observations, initial_moments, normalized
from apex_jax.config import ActorConfig, Config
from apex_jax.run.metrics import TAGS
from apex_jax.transport.params_codec import architecture_of, decode_weights, encode_weights
from tests.rigs.agents import assert_equal_bits, flat_params
from tests.rigs.reference import Arrays
from tests.rigs.reference_dpg import Learner, joined
from tests.rigs.small_agents import (
    BATCH,
    CONTINUOUS_VECTORS,
    DPG_ALL,
    DPG_BLOCKS,
    batch_of,
    dpg_config,
    observations,
    random_batches,
    random_store,
)


@pytest.fixture(scope="module")
def dpg() -> Algorithm:
    """The algorithm with everything that it can do."""
    return make_dpg(dpg_config(**DPG_ALL), CONTINUOUS_VECTORS)


@pytest.fixture(scope="module")
def learned(dpg: Algorithm) -> DPGState:
    """A state after some updates, in which nothing is as it was at the start."""
    return dpg.update(dpg.init(jax.random.key(0)), random_store(1, CONTINUOUS_VECTORS), *random_batches(2, 4), 1.0)[0]


def twin_of(state: DPGState, config: Config) -> Learner:
    return Learner(flat_params(state.policy), [flat_params(critic) for critic in state.critics], config)


def assert_params_equal(ours: Arrays, twin: Arrays) -> None:
    assert ours.keys() == twin.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, twin[name], rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("changes", [
    pytest.param({}, id="paper"),
    pytest.param(  # one layer, which is where the action joins
        {"action_gradient_clip": 0.0, "optimizer": "rmsprop", "policy_units": (6,), "critic_units": (7,)}, id="others"
    ),
    pytest.param(DPG_BLOCKS, id="blocks", marks=pytest.mark.long),
    pytest.param({"normalize_observations": True}, id="normalized", marks=pytest.mark.ci),
    pytest.param({"twin_critics": True}, id="twin_critics", marks=pytest.mark.long),
    pytest.param({"loss": "huber"}, id="huber", marks=pytest.mark.long),
    pytest.param({"max_gradient_norm": 0.02}, id="clipped", marks=pytest.mark.long),
    pytest.param(DPG_ALL, id="all"),
])  # fmt: skip
def test_updates_equal_their_numpy_twin(changes: dict[str, Any]) -> None:
    settings, store = dpg_config(**changes), random_store(3, CONTINUOUS_VECTORS)
    dpg = make_dpg(settings, CONTINUOUS_VECTORS)
    state = dpg.init(jax.random.key(0))
    twin = twin_of(state, settings)
    for updates in range(1, 8):  # the target networks are copied after updates 3 and 6
        indices, weights = random_batches(updates, 1)
        share = 1 - updates / 10  # of the learning rate
        state, output = dpg.update(state, store, indices, weights, share)
        priorities, metrics = twin.update(batch_of(store, indices[0], weights[0]), share)
        assert int(state.updates) == updates
        np.testing.assert_allclose(output.priorities[0], priorities, rtol=1e-4, atol=1e-4)
        assert output.metrics.keys() == metrics.keys() <= TAGS
        for name, value in metrics.items():
            np.testing.assert_allclose(output.metrics[name][0], value, rtol=1e-4, atol=1e-5, err_msg=name)
        assert_params_equal(flat_params(state.policy), twin.policy)
        assert_params_equal(flat_params(state.target_policy), twin.target_policy)
        assert_params_equal(joined([flat_params(critic) for critic in state.critics]), joined(twin.critics))
        assert_params_equal(joined([flat_params(each) for each in state.target_critics]), joined(twin.target_critics))
    assert state.moments.total == BATCH * len(twin.seen)
    if twin.seen:
        seen = np.concatenate(twin.seen)
        np.testing.assert_allclose(state.moments.mean, seen.mean(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.moments.variance, seen.var(axis=0), rtol=1e-5)


def test_acting_params_are_policy_critics_and_observation_moments_and_travel_bit_for_bit(
    dpg: Algorithm, learned: DPGState
) -> None:
    params = dpg.acting_params(learned)
    moments = {"mean": learned.moments.mean, "variance": learned.moments.variance}
    assert_equal_bits(params, {"policy": learned.policy, "critics": learned.critics, "observations": moments})
    shapes = jax.eval_shape(lambda key: dpg.acting_params(dpg.init(key)), jax.random.key(0))
    assert architecture_of(params) == architecture_of(shapes)  # raises if a leaf is not float32
    assert_equal_bits(decode_weights(encode_weights(params), shapes), params)


def test_without_noise_the_policy_acts_and_values_are_those_of_the_twin(dpg: Algorithm, learned: DPGState) -> None:
    twin, observation = twin_of(learned, dpg_config(**DPG_ALL)), observations(50, 10)
    store = random_store(1, CONTINUOUS_VECTORS)
    twin.seen = [batch_of(store, *batch).observation_t for batch in zip(*random_batches(2, 4), strict=True)]
    flat, noise = observation.reshape(50, -1), np.where(np.arange(50) < 25, 0, 0.5).astype(np.float32)
    action, value, bootstrap_value = dpg.act(dpg.acting_params(learned), observation, noise, jax.random.key(0), 0)
    best = twin.act(flat)
    np.testing.assert_allclose(action[:25], best[:25], rtol=1e-4, atol=1e-5)
    assert (abs(action - best)[25:] > 1e-3).any(axis=1).all()
    np.testing.assert_allclose(value, twin.values(flat, np.asarray(action))[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bootstrap_value, twin.values(flat, best).min(axis=0), rtol=1e-4, atol=1e-5)
    assert 0 < twin.values(flat, best).argmin(axis=0).sum() < 50  # each critic has the smaller value somewhere


def test_noise_is_normal_with_the_scale_of_each_environment(dpg: Algorithm, learned: DPGState) -> None:
    params, observation = dpg.acting_params(learned), np.zeros((6000, 2, 5), np.float32)
    scale = np.repeat(np.array([0.01, 0.04], np.float32), 3000)
    best = dpg.act(params, observation, np.zeros_like(scale), jax.random.key(1), 0).action
    assert np.abs(best).max() < 0.75  # no action below is clipped: the larger scale is 0.04
    normal = (dpg.act(params, observation, scale, jax.random.key(1), 0).action - best) / scale[:, None]
    five_deviations = 5 / np.sqrt(3000)
    for half in (normal[:3000], normal[3000:]):
        np.testing.assert_allclose(half.mean(axis=0), 0, atol=five_deviations)
        np.testing.assert_allclose((half**2).mean(axis=0), 1, atol=five_deviations * np.sqrt(2))
    np.testing.assert_allclose(np.corrcoef(normal.T), np.eye(3), atol=five_deviations)


def test_actions_are_clipped_to_their_range(dpg: Algorithm, learned: DPGState) -> None:
    noise = np.full(100, 10.0, np.float32)
    action = dpg.act(dpg.acting_params(learned), observations(100, 11), noise, jax.random.key(0), 0).action
    assert np.abs(action).max() <= 1
    assert (action == -1).any(axis=0).all()
    assert (action == 1).any(axis=0).all()


def test_fleet_explores_by_the_noise_ladder_and_evaluations_without_noise() -> None:
    dpg = make_dpg(dpg_config().replace(actor=ActorConfig(largest_noise=0.8, smallest_noise=0.05)), CONTINUOUS_VECTORS)
    np.testing.assert_allclose(dpg.exploration(3), [0.8, 0.2, 0.05], rtol=1e-6)
    assert dpg.evaluation_exploration == 0


def test_moments_of_batches_equal_those_of_all_observations_at_once() -> None:
    rng, add = np.random.default_rng(1), jax.jit(add_observations)
    scale, offset = np.array([1e-3, 1.0, 300.0, 0.0]), np.array([5.0, -2.0, 1e3, 7.0])
    moments, seen = initial_moments(4), np.zeros((0, 4), np.float32)
    for _ in range(200):
        batch = (rng.normal(size=(16, 4)) * scale + offset).astype(np.float32)
        moments, seen = add(moments, batch), np.concatenate([seen, batch])
        exact = seen.astype(np.float64)
        assert moments.total == len(seen)
        np.testing.assert_allclose(moments.mean, exact.mean(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(moments.variance, exact.var(axis=0), rtol=1e-3, atol=1e-6)


def test_normalized_observations_have_mean_0_and_variance_1_and_stay_as_they_are_before_the_first_update() -> None:
    observations = np.random.default_rng(3).normal(7, 5, size=(1000, 2)).astype(np.float32)
    observations[:, 1] = 3.5  # a constant becomes 0
    initial = initial_moments(2)
    np.testing.assert_allclose(normalized(observations, initial.mean, initial.variance), observations, rtol=1e-5)
    moments = add_observations(initial, jnp.asarray(observations))
    x = np.asarray(normalized(observations, moments.mean, moments.variance))
    np.testing.assert_allclose([x[:, 0].mean(), x[:, 0].var()], [0, 1], atol=1e-3)
    assert np.abs(x[:, 1]).max() <= 1e-3 / np.sqrt(EPSILON)


def test_count_of_observations_stops_growing_at_the_precision_of_float32() -> None:
    moments = initial_moments(1)._replace(total=jnp.float32(LARGEST_TOTAL))
    assert add_observations(moments, jnp.ones((128, 1))).total == jnp.float32(LARGEST_TOTAL)
