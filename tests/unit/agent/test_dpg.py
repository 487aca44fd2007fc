"""Ape-X DPG: whole updates against a NumPy twin, traces, acting, dtypes, a checkpoint, and moments of observations."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.dpg import DPGState, make_dpg
from apex_jax.agent.frame_store import FrameStore
from apex_jax.agent.moments import EPSILON, LARGEST_TOTAL, add_observations, initial_moments, normalized
from apex_jax.config import ActorConfig, AlgorithmConfig, Config, EnvironmentConfig, LearnerConfig, NetworkConfig
from apex_jax.run.checkpoint import Checkpointer, Progress
from apex_jax.run.metrics import TAGS
from apex_jax.segment_codec import LARGEST_OBSERVATION, value_limits
from apex_jax.transport.params_codec import architecture_of, decode_weights, encode_weights
from apex_jax.types import ActionSpec, SegmentSpec
from tests.rigs.agents import flat_params
from tests.rigs.reference import Arrays
from tests.rigs.reference_dpg import Batch, Learner, joined

SPEC = SegmentSpec(
    frame_shape=(5,), frame_dtype="float32", frame_stack=2, slots=16, n_step=3, action=ActionSpec.continuous(3)
)
CAPACITY, BATCH = 10, 12


def config(**changes: Any) -> Config:
    """A small configuration; each change is of a key of algorithm, network or learner."""
    settings: dict[str, Any] = {
        "action_gradient_clip": 0.1,
        "policy_units": (8, 6),
        "critic_units": (9, 7),
        "optimizer": "adam",
        "learning_rate": 0.01,
        "optimizer_epsilon": 1e-3,
        "target_update_interval": 3,
    } | changes
    groups = {"algorithm": AlgorithmConfig(), "network": NetworkConfig(), "learner": LearnerConfig()}
    for group, keys in groups.items():
        own = {name: settings.pop(name) for name in [*settings] if hasattr(keys, name)}
        groups[group] = replace(keys, **own)  # type: ignore[type-var, assignment]
    assert not settings, settings
    return Config(**groups)  # type: ignore[arg-type]


BLOCKS = {"layer_norm": True, "policy_units": (8, 6, 7), "critic_units": (9, 7, 6)}
ALL = BLOCKS | {
    "normalize_observations": True,
    "twin_critics": True,
    "loss": "huber",
    "max_gradient_norm": 0.02,  # every gradient here is larger
}


@cache
def compiled(config: Config) -> Algorithm:
    """Returns an algorithm that is compiled once for all tests that do not count traces."""
    return make_dpg(config, SPEC)


@pytest.fixture(scope="module")
def dpg() -> Algorithm:
    """The algorithm with everything that it can do."""
    return compiled(config(**ALL))


@pytest.fixture(scope="module")
def learned(dpg: Algorithm) -> DPGState:
    """A state after some updates, in which nothing is as it was at the start; a test that updates it copies it."""
    return dpg.update(dpg.init(jax.random.key(0)), random_store(1), *random_batches(2, 4), 1.0)[0]


def random_store(seed: int) -> FrameStore:
    rng, shape = np.random.default_rng(seed), (CAPACITY, SPEC.slots)
    return FrameStore(
        frames=jnp.asarray(rng.normal([0.3, -1, 0, 2, 0], [1, 2, 0.5, 1, 1], (*shape, 5)), jnp.float32),
        columns={
            "n_step_return": jnp.asarray(rng.normal(scale=2, size=shape), jnp.float32),
            "discount": jnp.asarray(rng.choice([0.0, 0.970299], shape), jnp.float32),
            "action": jnp.asarray(rng.uniform(-1, 1, (*shape, 3)), jnp.float32),
            "bootstrap_offset": jnp.asarray(rng.integers(1, 4, shape), jnp.uint8),
        },
    )


def random_batches(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    segment = rng.integers(0, CAPACITY, (count, BATCH))
    slot = rng.integers(SPEC.frame_stack - 1, SPEC.slots - SPEC.n_step, (count, BATCH))
    return (segment * SPEC.slots + slot).astype(np.int32), rng.random((count, BATCH), np.float32)


def twin_batch(store: FrameStore, indices: np.ndarray, weights: np.ndarray) -> Batch:
    """Returns the transitions at these indices, as the twin takes them."""
    frames = np.asarray(store.frames, np.float64).reshape(-1, 5)
    columns = {
        name: np.asarray(column).reshape(-1, *column.shape[2:])[indices] for name, column in store.columns.items()
    }
    k = columns.pop("bootstrap_offset")
    t, tpk = (np.concatenate([frames[newest - 1], frames[newest]], axis=1) for newest in (indices, indices + k))
    return Batch(t, tpk, columns["action"], columns["n_step_return"], columns["discount"], weights)


def twin_of(state: DPGState, config: Config) -> Learner:
    return Learner(flat_params(state.policy), [flat_params(critic) for critic in state.critics], config)


def assert_params_equal(ours: Arrays, twin: Arrays) -> None:
    assert ours.keys() == twin.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, twin[name], rtol=1e-4, atol=2e-5, err_msg=name)


def copy_of(state: DPGState) -> DPGState:
    return jax.tree.map(jnp.copy, state)


def assert_equal_leaves(leaf: Any, expected: Any) -> None:
    assert (leaf.dtype, leaf.shape) == (expected.dtype, expected.shape)
    assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()


def assert_equal_bits(tree: Any, expected: Any) -> None:
    jax.tree.map(assert_equal_leaves, tree, expected)  # which raises where their structures differ


# Updates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    pytest.param({}, id="paper"),
    pytest.param({"action_gradient_clip": 0.0}, id="action_gradient_not_clipped"),
    pytest.param({"optimizer": "rmsprop"}, id="rmsprop"),
    pytest.param({"policy_units": (6,), "critic_units": (7,)}, id="one_layer"),  # which is where the action joins
    pytest.param(BLOCKS, id="blocks", marks=pytest.mark.long),
    pytest.param({"normalize_observations": True}, id="normalized", marks=pytest.mark.long),
    pytest.param({"twin_critics": True}, id="twin_critics", marks=pytest.mark.long),
    pytest.param({"loss": "huber"}, id="huber", marks=pytest.mark.long),
    pytest.param({"max_gradient_norm": 0.02}, id="clipped", marks=pytest.mark.long),
    pytest.param(ALL, id="all"),
])  # fmt: skip
def test_updates_equal_their_numpy_twin(changes: dict[str, Any]) -> None:
    settings, store = config(**changes), random_store(3)
    dpg = compiled(settings)
    state = dpg.init(jax.random.key(0))
    twin = twin_of(state, settings)
    for updates in range(1, 8):  # the target networks are copied after updates 3 and 6
        indices, weights = random_batches(updates, 1)
        share = 1 - updates / 10  # of the learning rate
        state, output = dpg.update(state, store, indices, weights, share)
        priorities, metrics = twin.update(twin_batch(store, indices[0], weights[0]), share)
        assert int(state.updates) == updates
        np.testing.assert_allclose(output.priorities[0], priorities, rtol=1e-4, atol=1e-4)
        assert output.metrics.keys() == metrics.keys() <= TAGS.keys()
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


def test_updates_in_one_call_equal_single_calls_bit_for_bit(dpg: Algorithm, learned: DPGState) -> None:
    store, (indices, weights) = random_store(4), random_batches(5, 4)
    together, outputs = dpg.update(copy_of(learned), store, indices, weights, 0.5)
    apart, singles = copy_of(learned), []
    for i in range(4):
        apart, output = dpg.update(apart, store, indices[i : i + 1], weights[i : i + 1], 0.5)
        singles.append(output)
    assert_equal_bits(together, apart)
    assert_equal_bits(outputs, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *singles))


def test_update_donates_the_state_but_not_the_store_and_all_is_traced_once_per_shape() -> None:
    dpg, store = make_dpg(config(), SPEC), random_store(5)
    state = dpg.init(jax.random.key(0))
    for step, (count, traces) in enumerate(((1, 1), (1, 1), (4, 2), (4, 2), (1, 2))):
        dpg.act(dpg.acting_params(state), observations(2, step), np.zeros(2, np.float32), jax.random.key(step), step)
        old = state
        state, _ = dpg.update(old, store, *random_batches(count, count), 1 / count)
        assert dpg.update._cache_size() == traces  # type: ignore[attr-defined]
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert not any(array.is_deleted() for array in jax.tree.leaves(store))
    assert dpg.act._cache_size() == 1  # type: ignore[attr-defined]


def test_updates_on_a_gpu_have_no_conditional_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    dpg = make_dpg(config(**ALL), SPEC)
    state = jax.eval_shape(dpg.init, jax.random.key(0))
    program = str(jax.make_jaxpr(dpg.update)(state, random_store(4), *random_batches(5, 4), 1.0))
    assert "scan[" in program
    assert "cond[" not in program
    assert "while[" not in program


def test_bfloat16_activations_leave_parameters_priorities_and_metrics_float32(dpg: Algorithm) -> None:
    half, store, batches = make_dpg(config(**ALL), SPEC, jnp.bfloat16), random_store(6), random_batches(7, 4)
    state, output = half.update(half.init(jax.random.key(0)), store, *batches, 1.0)
    float32, int32 = jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)  # int32: numbers of updates and of optimizer steps
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {float32, int32}
    assert {leaf.dtype for leaf in jax.tree.leaves(output)} == {float32}
    _, single = dpg.update(dpg.init(jax.random.key(0)), store, *batches, 1.0)
    np.testing.assert_allclose(output.priorities[0], single.priorities[0], rtol=0.05, atol=0.05)
    assert not np.array_equal(output.priorities, single.priorities)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, ALL], ids=["paper", "all"])
def test_largest_accepted_observations_and_returns_keep_learning_finite(changes: dict[str, Any]) -> None:
    settings = config(**changes)
    dpg, store = compiled(settings), random_store(8)
    largest = value_limits(settings.replace(environment=EnvironmentConfig(reward_clip=0))).n_step_return
    returns = jnp.sign(store.columns["n_step_return"]) * largest
    store = FrameStore(jnp.sign(store.frames) * LARGEST_OBSERVATION, store.columns | {"n_step_return": returns})
    state, output = dpg.update(dpg.init(jax.random.key(0)), store, *random_batches(9, 4), 1.0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state, output)))


# State ------------------------------------------------------------------------------------------------------------


def test_target_networks_start_equal_to_the_others_and_share_no_buffer(dpg: Algorithm) -> None:
    state, again = dpg.init(jax.random.key(0)), dpg.init(jax.random.key(1))
    assert_equal_bits(state.target_policy, state.policy)
    assert_equal_bits(state.target_critics, state.critics)
    where = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(where)) == len(where)
    for ours, other in ((state.policy, again.policy), (state.critics, again.critics), state.critics):
        kernels = zip(jax.tree.leaves(ours), jax.tree.leaves(other), strict=True)
        assert not any(np.array_equal(a, b) for a, b in kernels if a.ndim > 1)  # another key, another critic


def test_acting_params_are_policy_critics_and_observation_moments_and_travel_bit_for_bit(
    dpg: Algorithm, learned: DPGState
) -> None:
    params = dpg.acting_params(learned)
    moments = {"mean": learned.moments.mean, "variance": learned.moments.variance}
    assert_equal_bits(params, {"policy": learned.policy, "critics": learned.critics, "observations": moments})
    shapes = jax.eval_shape(lambda key: dpg.acting_params(dpg.init(key)), jax.random.key(0))
    assert architecture_of(params) == architecture_of(shapes)  # raises if a leaf is not float32
    received = decode_weights(encode_weights(params), shapes)
    assert_equal_bits(received, params)
    arguments = (observations(6, 1), np.full(6, 0.1, np.float32), jax.random.key(1), 0)
    assert_equal_bits(dpg.act(received, *arguments), dpg.act(params, *arguments))


def test_state_restored_from_a_checkpoint_learns_on_bit_for_bit(
    dpg: Algorithm, learned: DPGState, tmp_path: Path
) -> None:
    progress = Progress(4, 100, 1.0, 2, "task=WalkerWalk-v1", architecture_of(dpg.acting_params(learned)))
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(learned, progress)
    checkpointer.wait()
    fresh = dpg.init(jax.random.key(9))
    found = checkpointer.restore_newest(fresh, progress.compatibility_key, progress.architecture)
    checkpointer.close()
    assert found is not None
    restored, restored_progress = found
    assert restored_progress == progress
    assert_equal_bits(restored, learned)
    store, batches = random_store(4), random_batches(5, 4)
    assert_equal_bits(
        dpg.update(jax.device_put(restored), store, *batches, 1.0), dpg.update(copy_of(learned), store, *batches, 1.0)
    )


# Acting -----------------------------------------------------------------------------------------------------------


def observations(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 2, 5)).astype(np.float32)


def test_without_noise_the_policy_acts_and_values_are_those_of_the_twin(dpg: Algorithm, learned: DPGState) -> None:
    twin, observation = twin_of(learned, config(**ALL)), observations(50, 10)
    twin.seen = [twin_batch(random_store(1), *batch).observation_t for batch in zip(*random_batches(2, 4), strict=True)]
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


def test_noise_depends_only_on_key_and_step(dpg: Algorithm, learned: DPGState) -> None:
    arguments = (dpg.acting_params(learned), observations(20, 12), np.full(20, 0.3, np.float32))
    draws = [dpg.act(*arguments, jax.random.key(key), step).action for key, step in ((7, 3), (7, 3), (7, 4), (8, 3))]
    assert_equal_bits(draws[0], draws[1])
    assert not (draws[0] == draws[2]).all(axis=1).any()
    assert not (draws[0] == draws[3]).all(axis=1).any()


def test_fleet_explores_by_the_noise_ladder_and_evaluations_without_noise() -> None:
    dpg = make_dpg(config().replace(actor=ActorConfig(largest_noise=0.8, smallest_noise=0.05)), SPEC)
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


def test_initial_moments_leave_observations_nearly_as_they_are() -> None:
    observations = np.random.default_rng(2).normal(size=(5, 3)).astype(np.float32)
    moments = initial_moments(3)
    x = np.asarray(normalized(observations, moments.mean, moments.variance))
    np.testing.assert_allclose(x, observations, rtol=1e-5)


def test_normalized_observations_have_mean_0_and_variance_1_and_a_constant_is_0() -> None:
    observations = np.random.default_rng(3).normal(7, 5, size=(1000, 2)).astype(np.float32)
    observations[:, 1] = 3.5
    moments = add_observations(initial_moments(2), jnp.asarray(observations))
    x = np.asarray(normalized(observations, moments.mean, moments.variance))
    np.testing.assert_allclose([x[:, 0].mean(), x[:, 0].var()], [0, 1], atol=1e-3)
    assert np.abs(x[:, 1]).max() <= 1e-3 / np.sqrt(EPSILON)


def test_count_of_observations_stops_growing_at_the_precision_of_float32() -> None:
    moments = initial_moments(1)._replace(total=jnp.float32(LARGEST_TOTAL))
    assert add_observations(moments, jnp.ones((128, 1))).total == jnp.float32(LARGEST_TOTAL)
