"""A small buffer, and transitions to fill it with."""

from __future__ import annotations

import numpy as np

from apex_jax.replay.buffer import PriorityResult, ReplayBuffer
from apex_jax.types import ActionSpec, Columns, SegmentSpec

L = 12
SPEC = SegmentSpec(
    frame_shape=(3,), frame_dtype="float32", frame_stack=2, slots=L, n_step=2, action=ActionSpec.discrete(2)
)


def buffer_of(num_segments: int = 4, alpha: float = 0.6, seed: int = 0) -> ReplayBuffer:
    return ReplayBuffer(SPEC, num_segments * SPEC.max_transitions, alpha, np.random.default_rng(seed))


def columns_of(priority: np.ndarray) -> Columns:
    return {"priority": priority.astype(np.float32)}  # the replay looks at nothing else


def priorities_at(**of_slot: float) -> Columns:
    """Columns with these priorities, `f3=0.5` for frame slot 3, and no other transition."""
    priority = np.zeros(L)
    for name, value in of_slot.items():
        priority[int(name[1:])] = value
    return columns_of(priority)


def random_columns(rng: np.random.Generator) -> Columns:
    priority = rng.random(L) * (rng.random(L) < 0.6)
    priority[0] = priority[-2:] = 0
    return columns_of(priority)


def update(buffer: ReplayBuffer, *elements: tuple[int, int, float]) -> PriorityResult:
    indices, generations, priorities = zip(*elements, strict=True)
    return buffer.update_priorities(np.array(indices), np.array(generations), np.array(priorities, np.float32))


def leaf(buffer: ReplayBuffer, index: int) -> float:
    return float(buffer.tree.get(np.array([index]))[0])
