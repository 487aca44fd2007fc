"""Munchausen Q-learning (Vieillard et al. 2020): the log-probability of the action is added to the reward.

    G = m(S_t, A_t) + sum_{j<k} gamma^j r_{t+j+1} + gamma^k V(S_{t+k})

    pi(a | s) = exp(q(s, a; theta-) / tau) / sum_b exp(q(s, b; theta-) / tau)
    m(s, a)   = alpha max(tau ln pi(a | s), l_0)                               the bonus, which is not positive
    V(s)      = sum_a pi(a | s) (q(s, a; theta-) - tau ln pi(a | s)) = tau ln sum_a exp(q(s, a; theta-) / tau)

The paper has k = 1. With k > 1 every reward of the sum would get the bonus of its own action, and every observation
between the two the entropy of its policy. A transition only keeps its first action and its two observations, so only
the first reward gets its bonus, and the rest is left out.

The target network makes policy and values, so that `algorithm.double_q` has no effect. An actor uses its own
parameters in place of theta-, and acts by the largest q-value, as without this option.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

TEMPERATURE = 0.03  # tau
BONUS_SHARE = 0.9  # alpha
LEAST_LOG_POLICY = -1.0  # l_0, of tau ln pi


def scaled_log_policy(q: jax.Array) -> jax.Array:
    """Returns tau ln pi(a | s), at most 0: q-values float32[B, A] -> float32[B, A]."""
    below_best = q - q.max(axis=-1, keepdims=True)  # so that no exponential overflows
    return below_best - TEMPERATURE * jnp.log(jnp.exp(below_best / TEMPERATURE).sum(axis=-1, keepdims=True))


def bonus(q: jax.Array) -> jax.Array:
    """Returns m(s, a) of each action: q-values float32[B, A] -> float32[B, A]."""
    return BONUS_SHARE * jnp.maximum(scaled_log_policy(q), LEAST_LOG_POLICY)


def soft_value(q: jax.Array, quantiles: jax.Array | None = None) -> jax.Array:
    """Returns V(s): q-values float32[B, A] -> float32[B].

    `quantiles`: float32[B, A, N], of which the q-values are the means; they replace q except in pi, and the result is
    float32[B, N].
    """
    log_policy = scaled_log_policy(q)
    policy = jnp.exp(log_policy / TEMPERATURE)
    if quantiles is not None:
        return (policy[:, :, None] * (quantiles - log_policy[:, :, None])).sum(axis=1)
    return (policy * (q - log_policy)).sum(axis=-1)
