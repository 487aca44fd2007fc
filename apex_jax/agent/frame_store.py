"""The learner's copy of the replay on its device: pixels are transferred once, batches are gathered by index."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.space_to_depth import from_blocks, to_blocks
from apex_jax.types import (
    MASK,
    Columns,
    Observation,
    SegmentSpec,
    StackSpec,
    joined,
    map_parts,
    named_parts,
    zero_columns,
)

Array: TypeAlias = jax.Array | np.ndarray  # JAX accepts either

FEW_TRANSITIONS = 2_000  # a replay of fewer is of no use


class FrameStore(NamedTuple):
    """The C segments of the replay ring; slot f of segment c has the replay index c x L + f."""

    frames: Observation  # [C, L, *O]; or images in blocks of s x s pixels: uint8[C, L, H/s, W/s, s, s, ...]
    columns: dict[str, Array]  # [C, L, ...] each, without the priority, which only the replay server keeps


class Transitions(NamedTuple):
    """A batch of transitions: `_t` is their start, `_tpk` is k steps later."""

    observation_t: Observation  # [B, F, *O]
    observation_tpk: Observation  # [B, F, *O]
    columns: dict[str, jax.Array]  # [B, ...] each: action, n_step_return, discount, ...


def store_bytes(spec: SegmentSpec, capacity_segments: int) -> int:
    """Returns the bytes of the store on the device."""
    column_bytes = sum(array.nbytes for array in _stored(zero_columns(spec)).values())
    return capacity_segments * (spec.slots * spec.frame_bytes + column_bytes)


def create_store(
    spec: SegmentSpec,
    capacity_segments: int,
    memory_bytes: int | None = None,
    block_size: int = 1,
) -> FrameStore:
    """Returns an empty store for `capacity_segments` segments on JAX's default device.

    `block_size`: see `space_to_depth.frame_block_size`; above 1, frames are stored as the blocks of pixels that the
    first convolution reads. No caller sees the difference.

    Raises ValueError if it needs more than `memory_bytes`, so that a run fails at its start, with a clear message.
    """
    if memory_bytes is not None and (needed := store_bytes(spec, capacity_segments)) > memory_bytes:
        most = capacity_segments * spec.max_transitions * memory_bytes // needed // 2  # the replay server has as many
        fix = f"lower replay.capacity_transitions to some {most}"
        raise ValueError(
            f"a replay of {capacity_segments * spec.max_transitions} transitions takes {needed / 1e9:.1f} GB of frames,"
            f" each {spec.frame_dtype}{list(spec.frame_shape)}, {spec.frame_bytes:,} bytes,"
            f" of which {memory_bytes / 1e9:.1f} GB fit:"
            f" {fix if most >= FEW_TRANSITIONS else 'make the observations smaller'}"
        )

    def zeros(part: StackSpec) -> jax.Array:
        shape = part.shape
        if block_size > 1 and len(shape) > 1:
            shape = *(side // block_size for side in shape[:2]), block_size, block_size, *shape[2:]
        return jnp.zeros((capacity_segments, spec.slots, *shape), part.dtype)

    return FrameStore(
        frames=map_parts(zeros, spec.observation),
        columns={
            name: jnp.zeros((capacity_segments, *column.shape), column.dtype)
            for name, column in _stored(zero_columns(spec)).items()
        },
    )


def _stored(columns: Columns) -> Columns:
    return {name: column for name, column in columns.items() if name != "priority"}


INSERT_SIZES = (8, 1)  # segments per call: only two shapes to compile; a scatter of 8 takes no longer than one of 1


def insert_segments(store: FrameStore, slots: np.ndarray, frames: Observation, columns: Columns) -> FrameStore:
    """Writes segments in place and returns the store; the one passed in is consumed (its buffers are donated).

    `slots`: int32[N] in [0, C), without duplicates. `frames`: [N, L, *O]; `columns`: [N, L, ...] each.
    """
    start, stored = 0, FrameStore(frames, dict[str, Array](_stored(columns)))
    while start < len(slots):
        size = next(size for size in INSERT_SIZES if start + size <= len(slots))
        part = slice(start, start + size)
        values = jax.tree.map(itemgetter(part), stored)
        store = _scatter(store, slots[part], values)
        start += size
    return store


@partial(jax.jit, donate_argnums=0)
def _scatter(store: FrameStore, slots: Array, values: FrameStore) -> FrameStore:
    def as_stored(stored: Array, frames: Array) -> Array:
        return to_blocks(frames, stored.shape[4]) if _are_blocks(stored) else frames

    values = values._replace(frames=map_parts(as_stored, store.frames, values.frames))
    return jax.tree.map(lambda array, value: array.at[slots].set(value, mode="drop"), store, values)


def _are_blocks(frames: Array) -> bool:
    return frames.ndim > 5  # [C, L, H, W, 3] are whole frames in color


def gather(store: FrameStore, indices: Array, frame_stack: int) -> Transitions:
    """Returns the transitions at replay indices int32[B] with stacked frames. Called inside a jitted function.

    The observation of slot f is the window of frames f-F+1..f (of a mask, that of f alone); the bootstrap observation
    is the same window k slots later. Both lie within the segment of f: no transition starts at a slot whose windows
    would reach beyond it.
    """
    flat = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), store)
    columns = {name: column[indices] for name, column in flat.columns.items()}
    offset = columns["bootstrap_offset"].astype(jnp.int32)

    def observation(slots: Array) -> Observation:
        parts = {}
        for name, part in named_parts(flat.frames).items():
            frames = part[slots[:, None] + jnp.arange(0 if name == MASK else 1 - frame_stack, 1)]
            # XLA removes this conversion together with its inverse in the network.
            parts[name] = from_blocks(frames) if _are_blocks(frames) else frames
        return joined(parts)

    return Transitions(observation(indices), observation(indices + offset), columns)
