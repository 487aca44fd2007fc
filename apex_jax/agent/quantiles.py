"""Quantile regression (QR-DQN, Dabney et al. 2018): the network learns N quantiles of the return of each action.

    z_i(s, a) estimates the quantile of tau_i = (2 i - 1) / (2 N), i = 1..N, and q(s, a) = mean_i z_i(s, a)
    G_j  = sum_{l<k} gamma^l r_{t+l+1} + gamma^k z_j(S_{t+k}, argmax_a q(S_{t+k}, a; theta); theta-)
    loss = sum_i mean_j |tau_i - 1{u_ij < 0}| l(u_ij),  u_ij = G_j - z_i(S_t, A_t; theta)

l is Huber's loss, whatever `algorithm.loss` is. Actions are chosen by q. The priority is |mean_j G_j - q(S_t, A_t)|,
the TD error of the means, which an actor computes, too, from its q-values alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax


def quantile_losses(quantiles_t: jax.Array, target: jax.Array) -> jax.Array:
    """Returns the loss of each transition, float32[B], from z_i(S_t, A_t) float32[B, N] and G_j float32[B, N]."""
    assert quantiles_t.shape == target.shape, (quantiles_t.shape, target.shape)
    count = quantiles_t.shape[1]
    tau = (jnp.arange(count) + 0.5) / count
    u = target[:, None, :] - quantiles_t[:, :, None]  # [B, i, j]
    asymmetry = jnp.abs(tau[:, None] - (u < 0))
    return (asymmetry * optax.huber_loss(u, delta=1.0)).mean(axis=2).sum(axis=1)
