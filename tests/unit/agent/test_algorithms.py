"""What DQN and DPG have in common: updates in one call, donation, traces, dtypes, draws, finite learning."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent.algorithm import Algorithm, UpdateOutput
from apex_jax.agent.dpg import make_dpg
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.exploration import choose_ladder_indices, epsilon_ladder, noise_ladder
from apex_jax.agent.frame_store import FrameStore
from apex_jax.agent.training import make_optimizer, make_update, maybe_copy_target
from apex_jax.config import Config, EnvironmentConfig, LearnerConfig
from apex_jax.segment_codec import value_limits
from apex_jax.types import SegmentSpec
from tests.rigs import reference
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
    "dqn, all": (DQN, config(munchausen=True, layer_norm=True, quantiles=5)),
    "dqn, normalized": (DQN, config(normalize_observations=True)),
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
    return random_store(seed, CONFIGS[name][0].spec)


@cache
def learned(name: str) -> Any:
    """Returns a state in which nothing is as it was at the start; a test that updates it copies it."""
    algorithm = compiled(name)
    return algorithm.update(algorithm.init(jax.random.key(0)), store_of(name, 1), *random_batches(2, 4), 1.0)[0]


# DQN is unrolled on a CPU, where XLA may round differently, and a loop on a GPU.
@pytest.mark.parametrize(("name", "backend", "is_exact"), [
    ("dqn", "cpu", False),
    *(pytest.param(*more, marks=pytest.mark.long) for more in (("dqn", "gpu", False), ("dpg, all", "cpu", True))),
])  # fmt: skip
def test_updates_in_one_call_equal_those_in_single_calls(
    name: str, backend: str, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    agent, settings = CONFIGS[name]
    algorithm = compiled(name) if backend == "cpu" else agent.make(settings, agent.spec)
    store, (indices, weights) = store_of(name, 4), random_batches(5, 4)
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


@pytest.mark.parametrize("name", ["dqn", *(pytest.param(name, marks=pytest.mark.long) for name in ("dqn, all", "dpg"))])
def test_update_donates_the_state_but_not_the_store_and_all_is_traced_once_per_shape(name: str) -> None:
    agent, settings = CONFIGS[name]
    algorithm, store = agent.make(settings, agent.spec), store_of(name, 5)
    state = algorithm.init(jax.random.key(0))
    for step, (count, traces) in enumerate(((1, 1), (1, 1), (4, 2), (4, 2), (1, 2))):
        exploration, key = np.zeros(2, np.float32), jax.random.key(step)
        algorithm.act(algorithm.acting_params(state), observations(2, step), exploration, key, step)
        old = state
        state, _ = algorithm.update(old, store, *random_batches(count, count), 1 / count)
        assert algorithm.update._cache_size() == traces  # type: ignore[attr-defined]
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert not any(array.is_deleted() for array in jax.tree.leaves(store))
    assert algorithm.act._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name", ["dqn", *(pytest.param(name, marks=pytest.mark.long) for name in ("dqn, all", "dpg, all"))]
)
def test_bfloat16_activations_leave_parameters_priorities_and_metrics_float32(name: str) -> None:
    agent, settings = CONFIGS[name]
    half, store = agent.make(settings, agent.spec, jnp.bfloat16), store_of(name, 6)
    state, output = half.update(half.init(jax.random.key(0)), store, *random_batches(7, 1), 1.0)
    float32, int32 = jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)  # int32: numbers of updates and of optimizer steps
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {float32, int32}
    assert {leaf.dtype for leaf in jax.tree.leaves(output)} == {float32}
    single = compiled(name)
    _, expected = single.update(single.init(jax.random.key(0)), store, *random_batches(7, 1), 1.0)
    np.testing.assert_allclose(output.priorities[0], expected.priorities[0], rtol=0.05, atol=0.05)
    assert not np.array_equal(output.priorities, expected.priorities)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dqn", "dqn, huber", "dqn, normalized", "dpg", "dpg, all"])
def test_largest_accepted_observations_and_returns_keep_learning_finite(name: str) -> None:
    algorithm, store = compiled(name), store_of(name, 8)
    limits = value_limits(CONFIGS[name][1].replace(environment=EnvironmentConfig(reward_clip=0)))
    returns = jnp.sign(store.columns["n_step_return"]) * limits.n_step_return
    store = FrameStore(jnp.sign(store.frames) * limits.observation, store.columns | {"n_step_return": returns})
    state, output = algorithm.update(algorithm.init(jax.random.key(0)), store, *random_batches(9, 8), 1.0)
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


# The optimizer ----------------------------------------------------------------------------------------------------


def test_step_for_a_constant_gradient_is_finite_though_rounding_makes_its_variance_negative() -> None:
    settings = LearnerConfig(max_gradient_norm=0.0)
    optimizer = make_optimizer(settings)
    gradient = {"x": np.random.default_rng(5).normal(scale=30.0, size=500).astype(np.float32)}
    state, update = optimizer.init(gradient), jax.jit(optimizer.update)
    largest = settings.learning_rate * np.abs(gradient["x"]) / np.sqrt(settings.optimizer_epsilon)
    for _ in range(600):
        step, state = update(gradient, state)
        assert (np.abs(step["x"]) <= largest * (1 + 1e-5)).all()  # false for NaN


# Target copies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "branches"), [("cpu", True), ("gpu", False)])
def test_a_target_copy_is_a_branch_only_on_a_cpu(backend: str, branches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    tree = {"kernel": np.ones((4, 3), np.float32), "bias": np.zeros(3, np.float32)}
    assert ("cond[" in str(jax.make_jaxpr(partial(maybe_copy_target))(True, tree, tree))) == branches


# Several updates in one call --------------------------------------------------------------------------------------


class Toy(NamedTuple):
    """A state whose parameters are one number."""

    online: jax.Array
    target: jax.Array
    updates: jax.Array


def toy_update(
    state: Toy, store: None, indices: jax.Array, weights: jax.Array, share: float
) -> tuple[Toy, UpdateOutput]:
    """An update whose result depends on all updates before it, and on their order."""
    online = 3 * state.online + indices.sum()
    output = UpdateOutput(weights * online, {"losses/td_loss": online + state.target + weights.sum()})
    return Toy(online, state.target, state.updates + 1), output


def copy_target(is_due: jax.Array, state: Toy) -> Toy:
    return state._replace(target=maybe_copy_target(is_due, state.online, state.target))


def call(unrolled: bool, interval: int = 1_000_000) -> Callable[..., tuple[Toy, UpdateOutput]]:
    update = make_update(toy_update, copy_target, interval, unrolled)
    return lambda state, indices, weights: update(state, None, indices, weights, 1.0)


def toy(updates: int = 0) -> Toy:
    return Toy(jnp.float32(1), jnp.float32(0), jnp.int32(updates))


@pytest.mark.parametrize("unrolled", [False, True])
def test_updates_of_a_call_are_made_in_turn(unrolled: bool) -> None:
    indices = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    weights = np.array([[1, 0.5], [0.25, 1], [0, 2]], np.float32)
    state, output = jax.jit(call(unrolled))(toy(), indices, weights)
    assert state.online == 3 * (3 * (3 * 1 + 3) + 7) + 11 == 86
    np.testing.assert_array_equal(output.priorities, [[6, 3], [6.25, 25], [0, 172]])  # of states 6, 25, 86
    np.testing.assert_array_equal(output.metrics["losses/td_loss"], [7.5, 26.25, 88])


@pytest.mark.parametrize(("unrolled", "loops"), [(False, 1), (True, 0)])
def test_unrolled_updates_are_a_program_without_a_loop(unrolled: bool, loops: int) -> None:
    batches = np.zeros((6, 2), np.int32), np.zeros((6, 2), np.float32)
    program = jax.make_jaxpr(call(unrolled))(toy(), *batches)
    assert str(program).count("scan[") == loops


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("interval", [4, 5])
def test_a_target_is_copied_every_interval_of_updates_in_whatever_part_of_a_call(
    interval: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    state, online, target, program = toy(), 1.0, 0.0, jax.jit(call(unrolled=backend == "cpu", interval=interval))
    for number in range(0, 12, 2):
        indices = np.arange(number, number + 2, dtype=np.int32)[:, None] % 3
        state, _ = program(state, indices, np.ones((2, 1), np.float32))
        for update in (number, number + 1):
            online = 3 * online + update % 3
            target = online if (update + 1) % interval == 0 else target
        assert (state.online, state.target, state.updates) == (np.float32(online), np.float32(target), number + 2)


def test_on_a_gpu_a_target_is_copied_once_a_call_though_earlier_calls_had_another_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    program, batches = call(unrolled=False, interval=8), (np.zeros((4, 2), np.int32), np.ones((4, 2), np.float32))
    state, _ = program(toy(updates=5), *batches)  # reaches 8 within the call
    assert state.target == state.online == 81


# Ladders of exploration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 32, 360])
def test_ladder_is_the_paper_formula(size: int) -> None:
    ladder = epsilon_ladder(size, base=0.4, exponent=7.0)
    assert ladder.dtype == np.float32
    np.testing.assert_allclose(ladder, reference.epsilon_ladder(size, 0.4, 7.0), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 32, 360])
@pytest.mark.parametrize(("largest", "smallest"), [(0.8, 0.05), (0.3, 0.3), (10.0, 1e-6)])
def test_noise_ladder_is_geometric_from_largest_to_smallest(size: int, largest: float, smallest: float) -> None:
    ladder = noise_ladder(size, largest, smallest)
    assert ladder.dtype == np.float32
    assert ladder.shape == (size,)
    np.testing.assert_allclose(ladder, reference.noise_ladder(size, largest, smallest), rtol=1e-6)


@pytest.mark.parametrize(("occupants", "count", "ladder_indices"), [
    ([0, 0, 0, 0], 4, [0, 1, 2, 3]),
    ([0, 0, 0, 0, 0], 2, [0, 4]),  # both ends: one actor alone covers all exploration rates
    ([0, 0, 0, 0, 0], 3, [0, 2, 4]),
    ([0, 0, 0, 0, 0], 1, [2]),
    ([1, 0, 1, 0, 1], 2, [1, 3]),  # the places of a dead actor are given again
    ([1, 0, 1, 0, 1], 3, [1, 2, 3]),
    ([0], 3, [0, 0, 0]),  # an actor beyond the ladder shares places
    ([1, 1], 3, [0, 1, 1]),
    ([5, 0, 5, 9], 4, [1, 1, 1, 1]),  # those that others have left
    ([5, 0, 5, 9], 9, [0, 1, 1, 1, 1, 1, 1, 1, 2]),
])  # fmt: skip
def test_new_actor_gets_the_least_occupied_ladder_indices_evenly_spread(
    occupants: list[int], count: int, ladder_indices: list[int]
) -> None:
    before = np.array(occupants)
    chosen = choose_ladder_indices(before, count)
    assert chosen.dtype == np.int32
    assert chosen.tolist() == ladder_indices
    assert before.tolist() == occupants  # the caller's array is not changed


@pytest.mark.parametrize("seed", range(10))
def test_occupation_stays_level_while_actors_come_and_go(seed: int) -> None:
    rng = np.random.default_rng(seed)
    occupants = np.zeros(rng.integers(1, 40), int)
    for _ in range(20):
        count = int(rng.integers(1, 60))
        unlevel = np.ptp(occupants)
        ladder_indices = choose_ladder_indices(occupants, count)
        assert len(ladder_indices) == count
        np.add.at(occupants, ladder_indices, 1)
        assert np.ptp(occupants) <= max(unlevel, 1)
        leaver = rng.random(count) < 0.5
        np.subtract.at(occupants, ladder_indices[leaver], 1)
        assert occupants.min() >= 0
