"""What DQN and DPG have in common: updates in one call, donation, traces, dtypes, draws, finite learning."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.dpg import make_dpg
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.frame_store import FrameStore
from apex_jax.config import Config, EnvironmentConfig
from apex_jax.segment_codec import LARGEST_OBSERVATION, value_limits
from apex_jax.types import SegmentSpec
from tests.rigs.agents import assert_equal_bits
from tests.rigs.small_agents import (
    CONTINUOUS_VECTORS,
    DPG_ALL,
    VECTORS,
    config,
    copy_of,
    dpg_config,
    observations,
    random_batches,
    random_store,
)


class Agent(NamedTuple):
    """An algorithm with the names of its networks in a state, each beside that of its target."""

    make: Callable[..., Algorithm]
    spec: SegmentSpec
    networks: tuple[tuple[str, str], ...]


DQN = Agent(make_dqn, VECTORS, (("online_params", "target_params"),))
DPG = Agent(make_dpg, CONTINUOUS_VECTORS, (("policy", "target_policy"), ("critics", "target_critics")))
CONFIGS: dict[str, tuple[Agent, Config]] = {
    "dqn": (DQN, config()),
    "dqn, huber": (DQN, config(loss="huber")),
    "dqn, all": (DQN, config(munchausen=True, value_rescaling=True, layer_norm=True, quantiles=5)),
    "dpg": (DPG, dpg_config()),
    "dpg, all": (DPG, dpg_config(**DPG_ALL)),
}
every_agent = pytest.mark.parametrize("name", ["dqn", "dpg, all"])


@cache
def compiled(name: str) -> Algorithm:
    """Returns an algorithm that is compiled once for all tests that do not count traces."""
    agent, settings = CONFIGS[name]
    return agent.make(settings, agent.spec)


def store_of(name: str, seed: int) -> FrameStore:
    return random_store(np.random.default_rng(seed), CONFIGS[name][0].spec)


def batches(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    return random_batches(np.random.default_rng(seed), count)


@cache
def learned(name: str) -> Any:
    """Returns a state in which nothing is as it was at the start; a test that updates it copies it."""
    algorithm = compiled(name)
    return algorithm.update(algorithm.init(jax.random.key(0)), store_of(name, 1), *batches(2, 4), 1.0)[0]


# DQN is unrolled on a CPU, where XLA may round differently, and a loop on a GPU.
@pytest.mark.parametrize(("name", "backend", "is_exact"), [
    ("dqn", "cpu", False), pytest.param("dqn", "gpu", False, marks=pytest.mark.long), ("dpg, all", "cpu", True),
])  # fmt: skip
def test_updates_in_one_call_equal_those_in_single_calls(
    name: str, backend: str, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    agent, settings = CONFIGS[name]
    algorithm = compiled(name) if backend == "cpu" else agent.make(settings, agent.spec)
    store, (indices, weights) = store_of(name, 4), batches(5, 4)
    together, outputs = algorithm.update(copy_of(learned(name)), store, indices, weights, 0.5)
    apart, singles = copy_of(learned(name)), []
    for i in range(4):
        apart, output = algorithm.update(apart, store, indices[i : i + 1], weights[i : i + 1], 0.5)
        singles.append(output)
    if is_exact:
        compare: Callable[[Any, Any], None] = assert_equal_bits
    else:
        compare = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6))
    compare(together, apart)
    compare(outputs, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *singles))


@pytest.mark.parametrize("name", ["dqn", pytest.param("dqn, all", marks=pytest.mark.long), "dpg"])
def test_update_donates_the_state_but_not_the_store_and_all_is_traced_once_per_shape(name: str) -> None:
    agent, settings = CONFIGS[name]
    algorithm, store = agent.make(settings, agent.spec), store_of(name, 5)
    state = algorithm.init(jax.random.key(0))
    for step, (count, traces) in enumerate(((1, 1), (1, 1), (4, 2), (4, 2), (1, 2))):
        exploration, key = np.zeros(2, np.float32), jax.random.key(step)
        algorithm.act(algorithm.acting_params(state), observations(2, step), exploration, key, step)
        old = state
        state, _ = algorithm.update(old, store, *batches(count, count), 1 / count)
        assert algorithm.update._cache_size() == traces  # type: ignore[attr-defined]
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert not any(array.is_deleted() for array in jax.tree.leaves(store))
    assert algorithm.act._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [pytest.param("dqn, all", marks=pytest.mark.long), "dpg, all"])
def test_bfloat16_activations_leave_parameters_priorities_and_metrics_float32(name: str) -> None:
    agent, settings = CONFIGS[name]
    half, store = agent.make(settings, agent.spec, jnp.bfloat16), store_of(name, 6)
    state, output = half.update(half.init(jax.random.key(0)), store, *batches(7, 4), 1.0)
    float32, int32 = jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)  # int32: numbers of updates and of optimizer steps
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {float32, int32}
    assert {leaf.dtype for leaf in jax.tree.leaves(output)} == {float32}
    single = compiled(name)
    _, expected = single.update(single.init(jax.random.key(0)), store, *batches(7, 4), 1.0)
    np.testing.assert_allclose(output.priorities[0], expected.priorities[0], rtol=0.05, atol=0.05)
    assert not np.array_equal(output.priorities, expected.priorities)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dqn", "dqn, huber", "dpg", "dpg, all"])
def test_largest_accepted_observations_and_returns_keep_learning_finite(name: str) -> None:
    algorithm, store = compiled(name), store_of(name, 8)
    largest = value_limits(CONFIGS[name][1].replace(environment=EnvironmentConfig(reward_clip=0))).n_step_return
    returns = jnp.sign(store.columns["n_step_return"]) * largest
    store = FrameStore(jnp.sign(store.frames) * LARGEST_OBSERVATION, store.columns | {"n_step_return": returns})
    state, output = algorithm.update(algorithm.init(jax.random.key(0)), store, *batches(9, 8), 1.0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((algorithm.acting_params(state), output)))


@every_agent
def test_target_networks_start_equal_to_the_others_and_share_no_buffer(name: str) -> None:
    algorithm = compiled(name)
    state, again = algorithm.init(jax.random.key(0)), algorithm.init(jax.random.key(1))
    where = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(where)) == len(where)
    for network, target in CONFIGS[name][0].networks:
        assert_equal_bits(getattr(state, target), getattr(state, network))
        kernels = zip(*(jax.tree.leaves(getattr(each, network)) for each in (state, again)), strict=True)
        assert not any(np.array_equal(a, b) for a, b in kernels if a.ndim > 1), "another key is another network"


@every_agent
def test_exploration_depends_only_on_key_and_step(name: str) -> None:
    algorithm, exploration = compiled(name), np.ones(100, np.float32)
    params = algorithm.acting_params(learned(name))
    first, same, *others = (
        np.asarray(algorithm.act(params, observations(100, 12), exploration, jax.random.key(key), step).action)
        for key, step in ((7, 3), (7, 3), (7, 4), (8, 3))
    )
    np.testing.assert_array_equal(first, same)
    assert not any(np.array_equal(first, other) for other in others)
