"""Several devices learn what one learns from the same batches, each with its own segments only."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.devices import DeviceStores, replicated
from apex_jax.agent.dpg import make_dpg
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.frame_store import store_bytes
from apex_jax.types import SegmentSpec
from tests.rigs.small_agents import CONTINUOUS_VECTORS, DPG_ALL, VECTORS, config, dpg_config, random_store
from tests.rigs.virtual_devices import on_virtual_devices

SEGMENTS, BATCH, CALLS, PER_CALL = 8, 16, 3, 2
AGENTS: dict[str, tuple[Callable[..., Algorithm], Callable[..., Any], SegmentSpec]] = {
    "dqn": (make_dqn, config, VECTORS),
    "dpg": (make_dpg, dpg_config, CONTINUOUS_VECTORS),
}
PARTS: dict[str, dict[str, Any]] = {  # with all that computes something over a batch
    "dqn": {"max_gradient_norm": 0.02, "quantiles": 4, "munchausen": True},
    "dpg": DPG_ALL,
}


def batches(spec: SegmentSpec, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns indices int32[CALLS, K, B], of which each device has its share, and weights float32[CALLS, K, B]."""
    rng, shape = np.random.default_rng(6), (CALLS, PER_CALL, devices, BATCH // devices)
    part = SEGMENTS // devices
    segment = rng.integers(0, part, shape) + part * np.arange(devices)[:, None]
    slot = rng.integers(spec.frame_stack - 1, spec.slots - spec.n_step, shape)
    indices = (segment * spec.slots + slot).astype(np.int32).reshape(CALLS, PER_CALL, BATCH)
    return indices, rng.random((CALLS, PER_CALL, BATCH), np.float32)


def learned(agent: str, devices: int, drawn: tuple[np.ndarray, np.ndarray]) -> tuple[Any, list[Any]]:
    """Returns the state after some calls of the update, and the output of each."""
    make, config_of, spec = AGENTS[agent]
    algorithm = make(config_of(**PARTS[agent], devices=devices), spec)
    state = replicated(algorithm.init(jax.random.key(1)), devices)
    stores = DeviceStores(spec, SEGMENTS, devices)
    store = jax.tree.map(np.asarray, random_store(5, spec))
    part = SEGMENTS // devices
    for first in range(0, SEGMENTS, part):
        slots = np.arange(first, first + part, dtype=np.int32)
        stores.insert(slots, store.frames[slots], {name: column[slots] for name, column in store.columns.items()})
    outputs = []
    for indices, weights in zip(*drawn, strict=True):
        before = jax.tree.leaves(state)
        state, output = algorithm.update(state, stores.whole, indices, weights, 0.5)
        assert all(leaf.is_deleted() for leaf in before), "the state was not donated"
        outputs.append(jax.tree.map(np.asarray, output))
    assert all(len(leaf.sharding.device_set) == devices for leaf in jax.tree.leaves(state))
    return jax.tree.map(np.asarray, state), outputs


def distance(ours: Any, expected: Any) -> float:
    """Returns the norm of the difference of two trees relative to the norm of the second."""
    vectors = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (ours, expected))
    x, y = (vector.astype(np.float64) for vector in vectors)
    difference = float(np.linalg.norm(x - y))
    return difference and difference / float(np.linalg.norm(y))


@pytest.mark.long
@pytest.mark.parametrize(("agent", "devices"), [("dqn", "2"), ("dqn", "4"), ("dpg", "2"), ("dpg", "4")])
@on_virtual_devices(4)
def test_several_devices_learn_what_one_learns_from_the_same_batches(agent: str, devices: str) -> None:
    drawn = batches(AGENTS[agent][2], int(devices))
    (several, outputs), (one, expected_outputs) = learned(agent, int(devices), drawn), learned(agent, 1, drawn)
    for name, expected in one._asdict().items():
        assert distance(getattr(several, name), expected) <= 1e-6, name
    for output, expected in zip(outputs, expected_outputs, strict=True):
        assert distance(output.priorities, expected.priorities) <= 1e-6
        assert distance(output.metrics, expected.metrics) <= 1e-6


@pytest.mark.long
@on_virtual_devices(4)
def test_parts_must_fit_their_devices_and_only_sums_of_gradients_and_metrics_cross_them() -> None:
    spec = VECTORS._replace(frame_shape=(6, 6), frame_dtype="uint8")
    needed = store_bytes(spec, SEGMENTS // 4)
    with pytest.raises(ValueError, match=r"lower replay\.capacity_transitions"):
        DeviceStores(spec, SEGMENTS, 4, needed - 1)
    algorithm = make_dqn(config(devices=4), spec)
    state = replicated(algorithm.init(jax.random.key(1)), 4)
    store = DeviceStores(spec, SEGMENTS, 4, needed).whole
    arguments = state, store, *(each[0] for each in batches(spec, 4)), 1.0
    program = jax.jit(algorithm.update).lower(*arguments).compile().as_text() or ""
    collectives = re.findall(r"= (\(.*?\)|\S+) (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", program)
    assert {name for _, name in collectives} == {"all-reduce"}
    arrays = [found for results, _ in collectives for found in re.findall(r"(\w+)\[([\d,]*)\]", results)]
    assert {dtype for dtype, _ in arrays} == {"f32"}, "frames are bytes"
    summed = sum(math.prod(int(size) for size in sizes.split(",") if size) for _, sizes in arrays)
    params = sum(leaf.size for leaf in jax.tree.leaves(state.online_params))
    assert PER_CALL * params <= summed <= PER_CALL * (params + 8), "and some metrics"


def test_one_device_compiles_the_update_alone() -> None:
    spec = VECTORS
    algorithm = make_dqn(config(devices=1), spec)
    store = DeviceStores(spec, SEGMENTS, 1).whole
    arguments = algorithm.init(jax.random.key(1)), store, *(each[0] for each in batches(spec, 1)), 1.0
    program = jax.jit(algorithm.update).lower(*arguments).as_text()
    assert "all_reduce" not in program
    assert "manual" not in program, "a shard_map"
