"""The equations of Ape-X DQN and Ape-X DPG, one per function (Horgan et al. 2018, section 3 and appendix).

Two are elsewhere: the sum of n rewards in `segments.py`, P(i) and importance weights in `apex_jax/replay/buffer.py`.

Suffixes: `_t` at the start of a transition, `_tpk` at its bootstrap observation, k steps later.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

MIN_PRIORITY = 1e-6  # so that a transition without error can be drawn; 0 means that no transition starts there


def n_step_target(
    n_step_return: jax.Array, discount: jax.Array, q_online_tpk: jax.Array, q_target_tpk: jax.Array, double_q: bool
) -> jax.Array:
    """Returns the bootstrapped n-step return G, float32[B], through which no gradient flows.

    G = sum_{j<k} gamma^j r_{t+j+1} + gamma^k q(S_{t+k}, argmax_a q(S_{t+k}, a; theta); theta-)

    `n_step_return` is the sum over j, `discount` is gamma^k (0 after a termination). q-values are float32[B, A]. If
    `double_q` is False, the target network also chooses the action, and `q_online_tpk` is not used. If q_target_tpk has
    one more axis, of quantiles, so has the result.
    """
    assert n_step_return.shape == discount.shape == q_target_tpk.shape[:1], (n_step_return.shape, q_target_tpk.shape)
    chooser = q_online_tpk if double_q else q_target_tpk
    bootstrap = select_action_value(q_target_tpk, jnp.argmax(chooser, axis=-1))
    return bootstrapped(n_step_return, discount, bootstrap)


def bootstrapped(n_step_return: jax.Array, discount: jax.Array, value_tpk: jax.Array) -> jax.Array:
    """Returns `n_step_return + discount * value_tpk`, through which no gradient flows.

    `value_tpk`: float32[B], or float32[B, N] of quantiles; the result has its shape.
    """
    assert n_step_return.shape == discount.shape == value_tpk.shape[:1], (n_step_return.shape, value_tpk.shape)
    n_step_return, discount = per_row(n_step_return, value_tpk.ndim), per_row(discount, value_tpk.ndim)
    return jax.lax.stop_gradient(n_step_return + discount * value_tpk)


def per_row(values: jax.Array, ndim: int) -> jax.Array:
    """Returns values of each row, float32[B], as an array of `ndim` axes, float32[B, 1, ...]."""
    return values.reshape(-1, *(1,) * (ndim - 1))


def policy_target(n_step_return: jax.Array, discount: jax.Array, q_target_tpk: jax.Array) -> jax.Array:
    """Returns the bootstrapped n-step return of Ape-X DPG, float32[B], through which no gradient flows.

    G = sum_{j<k} gamma^j r_{t+j+1} + gamma^k q(S_{t+k}, pi(S_{t+k}; phi-); psi-)

    `q_target_tpk`: float32[C, B], of each of the C target critics, whose minimum is used (Fujimoto et al. 2018).
    """
    assert n_step_return.shape == discount.shape == q_target_tpk.shape[1:], (n_step_return.shape, q_target_tpk.shape)
    return jax.lax.stop_gradient(n_step_return + discount * q_target_tpk.min(axis=0))


def policy_descent(dq_da: jax.Array, clip: float) -> jax.Array:
    """Returns the gradient of the policy's loss by its actions, float32[B, A]: -clip(dq/da, -c, c) / B.

    The chain rule through pi makes it the deterministic policy gradient, which ascends mean_i q(S_i, pi(S_i; phi))
    (Silver et al. 2014), with each element of dq/da clipped to [-clip, clip]; 0 = never. Importance weights are not
    part of it, as in D4PG (Barth-Maron et al. 2018).
    """
    clipped = jnp.clip(dq_da, -clip, clip) if clip else dq_da
    return -clipped / len(dq_da)


def select_action_value(q: jax.Array, action: jax.Array) -> jax.Array:
    """Returns q(s, a) of one action per row: q is float32[B, A], action int32[B], the result float32[B].

    If q has one more axis, of quantiles, so has the result.
    """
    assert q.ndim >= 2, q.shape
    assert action.shape == q.shape[:1], (q.shape, action.shape)
    if q.ndim == 3:
        return jnp.take_along_axis(q, action[:, None, None], axis=1)[:, 0]
    return jnp.take_along_axis(q, action[:, None], axis=-1)[:, 0]


def weighted_loss(td_error: jax.Array, importance_weight: jax.Array, form: str) -> jax.Array:
    """Returns mean_i w_i l(delta_i), float32[]; l is delta^2 / 2 ("squared", the paper's) or Huber's ("huber")."""
    assert td_error.shape == importance_weight.shape, (td_error.shape, importance_weight.shape)
    losses = optax.l2_loss(td_error) if form == "squared" else optax.huber_loss(td_error, delta=1.0)
    return jnp.mean(importance_weight * losses)


def priority(td_error: jax.Array) -> jax.Array:
    """Returns the priority of a transition, |delta|, at least MIN_PRIORITY."""
    return jnp.maximum(jnp.abs(td_error), MIN_PRIORITY)


def initial_priority(
    n_step_return: np.ndarray, discount: np.ndarray, value_t: np.ndarray, bootstrap_value_tpk: np.ndarray
) -> np.ndarray:
    """Returns an actor's initial priorities from the values that it computed while acting, float32[N].

    |sum_{j<k} gamma^j r_{t+j+1} + gamma^k max_a q(S_{t+k}, a) - q(S_t, A_t)|, all with the actor's parameters,
    without a second forward pass (Horgan et al. 2018, section 3). In Ape-X DPG, q(S_{t+k}, pi(S_{t+k})) replaces the
    maximum.
    """
    td_error = n_step_return + discount * bootstrap_value_tpk - value_t
    return np.maximum(np.abs(td_error), MIN_PRIORITY).astype(np.float32)
