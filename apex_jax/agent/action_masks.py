"""Masks of invalid actions: the part MASK of an observation, if `ActionSpec.is_masked`.

The network sees the other parts. The outputs of invalid actions become INVALID, so that no maximum, softmax or draw
chooses one, in acting as in targets.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from apex_jax.types import MASK, Observation, joined, named_parts

INVALID = -1e30  # below every value; finite, because 0 times it has to be 0


def split_mask(observation: Observation) -> tuple[Observation, jax.Array | None]:
    """Returns what the network sees of observations, and their masks: float32[B, A] of 0 and 1; None without masks.

    A mask without a valid action counts as one without an invalid one: that of a slot in which no transition starts.
    """
    parts = dict(named_parts(observation))
    mask = parts.pop(MASK, None)
    if mask is None:
        return observation, None
    mask = jnp.asarray(jnp.reshape(mask, (mask.shape[0], mask.shape[2])), jnp.float32)  # a mask is not stacked
    return joined(parts), jnp.maximum(mask, 1 - mask.max(axis=-1, keepdims=True))


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
