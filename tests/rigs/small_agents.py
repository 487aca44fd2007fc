"""A small Ape-X DQN and a small Ape-X DPG on vectors, and random experience for them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.frame_store import FrameStore
from apex_jax.config import AlgorithmConfig, Config, LearnerConfig, NetworkConfig
from apex_jax.types import ActionSpec, SegmentSpec
from tests.rigs.reference import Batch

VECTORS = SegmentSpec(
    frame_shape=(5,), frame_dtype="float32", frame_stack=2, slots=16, n_step=3, action=ActionSpec.discrete(3)
)
CONTINUOUS_VECTORS = VECTORS._replace(action=ActionSpec.continuous(3))
LEARNER: dict[str, Any] = {"learning_rate": 0.01, "optimizer_epsilon": 1e-3, "target_update_interval": 3}
DQN: dict[str, Any] = {"channels": (), "kernel_sizes": (), "strides": (), "hidden_units": 8}
DPG: dict[str, Any] = {
    "action_gradient_clip": 0.1,
    "policy_units": (8, 6),
    "critic_units": (9, 7),
    "optimizer": "adam",
}
DPG_BLOCKS: dict[str, Any] = {"layer_norm": True, "policy_units": (8, 6, 7), "critic_units": (9, 7, 6)}
DPG_ALL: dict[str, Any] = DPG_BLOCKS | {
    "normalize_observations": True,
    "twin_critics": True,
    "loss": "huber",
    "max_gradient_norm": 0.02,  # every gradient here is larger
}
CAPACITY, BATCH = 10, 12


def config(**changes: Any) -> Config:
    """A small configuration of DQN; each change is of a key of algorithm, network or learner."""
    settings = DQN | LEARNER | changes

    def own(group: Any) -> dict[str, Any]:
        return {field.name: settings.pop(field.name) for field in fields(group) if field.name in settings}

    groups = {"algorithm": AlgorithmConfig, "network": NetworkConfig, "learner": LearnerConfig}
    made = Config(**{name: group(**own(group)) for name, group in groups.items()})
    assert not settings, settings
    return made


def dpg_config(**changes: Any) -> Config:
    """A small configuration of DPG."""
    return config(**DPG | changes)


def random_store(seed: int, spec: SegmentSpec = VECTORS) -> FrameStore:
    rng, shape, is_continuous = np.random.default_rng(seed), (CAPACITY, spec.slots), spec.action.dtype == "float32"
    mean, deviation = ([0.3, -1, 0, 2, 0], [1, 2, 0.5, 1, 1]) if is_continuous else (0, 1)  # DPG may normalize them
    if is_continuous:
        action = jnp.asarray(rng.uniform(-1, 1, (*shape, *spec.action.shape)), jnp.float32)
    else:
        action = jnp.asarray(rng.integers(0, 3, shape), jnp.int32)
    return FrameStore(
        frames=jnp.asarray(rng.normal(mean, deviation, (*shape, 5)), jnp.float32),
        columns={
            "n_step_return": jnp.asarray(rng.normal(size=shape), jnp.float32),
            "discount": jnp.asarray(rng.choice([0.0, 0.970299], shape), jnp.float32),
            "action": action,
            "bootstrap_offset": jnp.asarray(rng.integers(1, 4, shape), jnp.uint8),
        },
    )


def random_batches(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns indices int32[count, BATCH] and weights float32[count, BATCH]."""
    rng = np.random.default_rng(seed)
    segment = rng.integers(0, CAPACITY, (count, BATCH))
    slot = rng.integers(VECTORS.frame_stack - 1, VECTORS.slots - VECTORS.n_step, (count, BATCH))
    return (segment * VECTORS.slots + slot).astype(np.int32), rng.random((count, BATCH), np.float32)


def batch_of(store: FrameStore, indices: np.ndarray, weights: np.ndarray) -> Batch:
    """Returns the transitions at replay indices [B], with the stacks of two frames as one vector each."""
    columns = {
        name: np.asarray(column).reshape(-1, *column.shape[2:])[indices] for name, column in store.columns.items()
    }
    frames, at_bootstrap = np.asarray(store.frames).reshape(-1, 5), indices + columns.pop("bootstrap_offset")
    observation_t, observation_tpk = (
        np.concatenate([frames[at - 1], frames[at]], axis=1) for at in (indices, at_bootstrap)
    )
    return Batch(observation_t, observation_tpk, weight=weights, **columns)


def observations(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 2, 5)).astype(np.float32)


def copy_of(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)
