"""Masks of invalid actions: the last `num_actions` elements of a vector observation, if `ActionSpec.is_masked`.

The network sees the elements before them. The outputs of invalid actions become INVALID, so that no maximum, softmax or
draw chooses one, in acting as in targets.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from apex_jax.agent.frame_store import Array
from apex_jax.types import SegmentSpec

INVALID = -1e30  # below every value; finite, because 0 times it has to be 0


def split_mask(observation: Array, spec: SegmentSpec) -> tuple[Any, jax.Array | None]:
    """Returns what the network sees of observations [B, F, *O], and their masks: float32[B, A] of 0 and 1, or None.

    A mask without a valid action counts as one without an invalid one: that of a slot in which no transition starts.
    """
    if not spec.action.is_masked:
        return observation, None
    seen, mask = jnp.split(observation, [spec.frame_shape[0] - spec.action.num_actions], axis=-1)
    mask = jnp.reshape(mask, (mask.shape[0], spec.action.num_actions))  # F = 1: vectors are not stacked
    return seen, jnp.maximum(mask, 1 - mask.max(axis=-1, keepdims=True))


def masked(outputs: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns outputs [B, A] or [B, A, N] with INVALID in place of those of invalid actions."""
    if mask is None:
        return outputs
    mask = jnp.reshape(mask, (*mask.shape, *(1,) * (outputs.ndim - 2)))
    return outputs * mask + (1 - mask) * INVALID  # no `where`, which the ONNX export does not know


def random_actions(key: jax.Array, count: int, num_actions: int, mask: jax.Array | None) -> jax.Array:
    """Returns valid actions, int32[count], each with the same probability."""
    if mask is None:
        return jax.random.randint(key, (count,), 0, num_actions)
    return jax.random.categorical(key, jnp.log(mask))
