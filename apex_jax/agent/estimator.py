"""The meaning and the loss of the outputs of a DQN network, as the options in `algorithm.*` choose them.

The equations of plain Q-learning are in `losses.py`, and each option is a module of its own. All can be combined; the
policy, the bonus m, the soft value V and the means of quantiles are then computed in the network's own scale:

    G = m(S_t, A_t) + h(sum_{j<k} gamma^j r_{t+j+1} + gamma^k h^-1(V(S_{t+k})))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from apex_jax.agent import losses, munchausen, value_rescaling
from apex_jax.agent.frame_store import Transitions
from apex_jax.agent.quantiles import quantile_losses
from apex_jax.config import AlgorithmConfig

OPTIONS = ("munchausen", "value_rescaling", "quantiles")
"""The keys of `algorithm` that only DQN has; all are off by default."""

Values: TypeAlias = Callable[[jax.Array], jax.Array]


class Estimator(NamedTuple):
    """Functions of q-values q, float32[B, A], and of the network's outputs: q, or N quantiles of each, [B, A, N].

    Both are in the scale of the network; the results of `action_values` and `state_value` are in that of the rewards.
    """

    mean: Values  # outputs -> q; float32[B, N] -> float32[B]
    action_values: Values  # q -> estimated return of each action, float32[B, A]
    state_value: Values  # q -> the value in a bootstrapped target, float32[B]
    target: Callable[[Transitions, Values, Values], jax.Array]
    """Batch, online network, target network (observations -> outputs) -> G, float32[B] or [B, N], in their scale."""
    loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # outputs of the actions, G, weights -> float32[]
    outputs: int = 0  # N, see `make_q_network`


def make_estimator(options: AlgorithmConfig) -> Estimator:
    """Returns the estimator of these options."""
    h, inverse_h = (value_rescaling.rescaled, value_rescaling.unscaled) if options.value_rescaling else (_same, _same)
    mean: Values = _mean_of_quantiles if options.quantiles else _same

    def loss(outputs_t: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        if options.quantiles:
            return jnp.mean(weights * quantile_losses(outputs_t, targets))
        return losses.weighted_loss(targets - outputs_t, weights, options.loss)

    def plain_target(batch: Transitions, online: Values, target: Values) -> jax.Array:
        outputs_tpk = target(batch.observation_tpk)
        chooser = mean(jax.lax.stop_gradient(online(batch.observation_tpk)) if options.double_q else outputs_tpk)
        returns = batch.columns["n_step_return"], batch.columns["discount"]
        return h(losses.n_step_target(*returns, chooser, inverse_h(outputs_tpk), double_q=True))

    def munchausen_target(batch: Transitions, online: Values, target: Values) -> jax.Array:
        outputs_tpk = target(batch.observation_tpk)
        value = munchausen.soft_value(mean(outputs_tpk), outputs_tpk if options.quantiles else None)
        bonuses = munchausen.bonus(mean(target(batch.observation_t)))
        bonus = losses.per_row(losses.select_action_value(bonuses, batch.columns["action"]), value.ndim)
        returns = batch.columns["n_step_return"], batch.columns["discount"]
        return bonus + h(losses.bootstrapped(*returns, inverse_h(value)))

    if options.munchausen:
        return Estimator(
            mean,
            lambda q: inverse_h(q - munchausen.bonus(q)),
            lambda q: inverse_h(munchausen.soft_value(q)),
            munchausen_target,
            loss,
            options.quantiles,
        )
    return Estimator(mean, inverse_h, lambda q: inverse_h(q.max(axis=-1)), plain_target, loss, options.quantiles)


def _same(values: jax.Array) -> jax.Array:
    return values


def _mean_of_quantiles(values: jax.Array) -> jax.Array:
    return values.mean(axis=-1)
