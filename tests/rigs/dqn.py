"""A small Ape-X DQN on vectors, and random experience for it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax.numpy as jnp
import numpy as np

from apex_jax.agent.frame_store import FrameStore
from apex_jax.config import AlgorithmConfig, Config, LearnerConfig, NetworkConfig
from apex_jax.types import ActionSpec, SegmentSpec
from tests.rigs import reference_dqn

VECTORS = SegmentSpec(
    frame_shape=(5,), frame_dtype="float32", frame_stack=2, slots=16, n_step=3, action=ActionSpec.discrete(3)
)
SMALL: dict[str, Any] = {"channels": (), "kernel_sizes": (), "strides": (), "hidden_units": 8}
LEARNER: dict[str, Any] = {"learning_rate": 0.01, "optimizer_epsilon": 1e-3, "target_update_interval": 3}
CAPACITY, BATCH = 10, 12


def config(**changes: Any) -> Config:
    """A small configuration; each change is of a key of algorithm, network or learner."""
    settings = SMALL | LEARNER | changes

    def own(group: Any) -> dict[str, Any]:
        return {field.name: settings.pop(field.name) for field in fields(group) if field.name in settings}

    groups = {"algorithm": AlgorithmConfig, "network": NetworkConfig, "learner": LearnerConfig}
    made = Config(**{name: group(**own(group)) for name, group in groups.items()})
    assert not settings, settings
    return made


def random_store(rng: np.random.Generator) -> FrameStore:
    shape = (CAPACITY, VECTORS.slots)
    return FrameStore(
        frames=jnp.asarray(rng.normal(size=(*shape, 5)), jnp.float32),
        columns={
            "n_step_return": jnp.asarray(rng.normal(size=shape), jnp.float32),
            "discount": jnp.asarray(rng.choice([0.0, 0.970299], shape), jnp.float32),
            "action": jnp.asarray(rng.integers(0, 3, shape), jnp.int32),
            "bootstrap_offset": jnp.asarray(rng.integers(1, 4, shape), jnp.uint8),
        },
    )


def random_batches(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    segment = rng.integers(0, CAPACITY, (count, BATCH))
    slot = rng.integers(VECTORS.frame_stack - 1, VECTORS.slots - VECTORS.n_step, (count, BATCH))
    return (segment * VECTORS.slots + slot).astype(np.int32), rng.random((count, BATCH), np.float32)


def batch_of(store: FrameStore, indices: np.ndarray, weights: np.ndarray) -> reference_dqn.Batch:
    """Returns the transitions at replay indices [B], with the stacks of two frames as one vector each."""
    columns = {name: np.asarray(column).reshape(-1)[indices] for name, column in store.columns.items()}
    frames, at_bootstrap = np.asarray(store.frames).reshape(-1, 5), indices + columns.pop("bootstrap_offset")
    observation_t, observation_tpk = (
        np.concatenate([frames[at - 1], frames[at]], axis=1) for at in (indices, at_bootstrap)
    )
    return reference_dqn.Batch(observation_t, observation_tpk, weight=weights, **columns)
