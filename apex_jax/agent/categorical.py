"""Categorical returns (C51, Bellemare et al. 2017): the network learns how probable N returns are, of each action.

    z_i  = lowest + i d, i = 0..N-1, d = (highest - lowest) / (N - 1);  q(s, a) = sum_i p_i(s, a) z_i
    y_j  = sum_{l<k} gamma^l r_{t+l+1} + gamma^k z_j, where A* has the probability p_j(S_{t+k}, A*; theta-)
    G_i  = sum_j p_j max(0, 1 - |y_j - z_i| / d)
    loss = -sum_i G_i log p_i(S_t, A_t; theta)

p is the softmax of the outputs, and A* the action with the largest q, of the online network if `algorithm.double_q`.
Returns beyond the bounds count as the bounds, so no value grows beyond what is possible, as the maximum over noisy
values does otherwise: where most states are as good as can be, as in CartPole, that hides the small differences between
actions. The priority is |sum_i G_i z_i - q(S_t, A_t)|; an actor, which has the means, computes it without the bounds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LEAST_PROBABILITY = 1e-30  # whose logarithm is finite


def means(logits: jax.Array, returns: jax.Array) -> jax.Array:
    """Returns q of the outputs float32[..., N] for the returns z, float32[N]."""
    return (jax.nn.softmax(logits) * returns).sum(axis=-1)


def log_projection(p: jax.Array, moved: jax.Array, returns: jax.Array) -> jax.Array:
    """Returns log G, float32[B, N], for the probabilities p, float32[B, N], of the places that z has moved to."""
    distance = abs(jnp.clip(moved, returns[0], returns[-1])[:, :, None] - returns) / (returns[1] - returns[0])
    shares = jnp.maximum(0, 1 - distance)  # of each place in its two neighbours
    return jnp.log((p[:, :, None] * shares).sum(axis=1) + LEAST_PROBABILITY)


def cross_entropies(logits_t: jax.Array, log_target: jax.Array) -> jax.Array:
    """Returns the loss of each transition, float32[B], from the outputs and log G, both float32[B, N]."""
    return -(jnp.exp(log_target) * jax.nn.log_softmax(logits_t)).sum(axis=-1)
