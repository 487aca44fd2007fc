"""The meaning and the loss of the outputs of a DQN network, as the options in `algorithm.*` choose them.

The equations of plain Q-learning are in `losses.py`, and each option is a module of its own. Munchausen targets and
quantiles can be combined, with the bonus m and the soft value V of each quantile; categorical returns stand alone:

    G = m(S_t, A_t) + sum_{j<k} gamma^j r_{t+j+1} + gamma^k V(S_{t+k})
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from apex_jax.agent import categorical, losses, munchausen
from apex_jax.agent.frame_store import Transitions
from apex_jax.agent.quantiles import quantile_losses
from apex_jax.config import AlgorithmConfig

OPTIONS = ("munchausen", "quantiles", "atoms")
"""The keys of `algorithm` that only DQN has; all are off by default."""

Values: TypeAlias = Callable[[jax.Array], jax.Array]


class Estimator(NamedTuple):
    """Functions of q-values q, float32[B, A], and of the network's outputs: q, or N numbers for each, [B, A, N]."""

    mean: Values  # outputs -> q; float32[B, N] -> float32[B]
    action_values: Values  # q -> estimated return of each action, float32[B, A]
    state_value: Values  # q -> the value in a bootstrapped target, float32[B]
    target: Callable[[Transitions, Values, Values], jax.Array]
    """Batch, online network, target network (observations -> outputs) -> G, float32[B] or [B, N], as outputs."""
    loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # outputs of the actions, G, weights -> float32[]
    outputs: int = 0  # N, see `make_q_network`


def make_estimator(options: AlgorithmConfig) -> Estimator:
    """Returns the estimator of these options."""
    if options.atoms:
        return _categorical(options)
    mean: Values = _mean_of_quantiles if options.quantiles else _same

    def loss(outputs_t: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        if options.quantiles:
            return jnp.mean(weights * quantile_losses(outputs_t, targets))
        return losses.weighted_loss(targets - outputs_t, weights, options.loss)

    def plain_target(batch: Transitions, online: Values, target: Values) -> jax.Array:
        outputs_tpk = target(batch.observation_tpk)
        chooser = mean(jax.lax.stop_gradient(online(batch.observation_tpk)) if options.double_q else outputs_tpk)
        returns = batch.columns["n_step_return"], batch.columns["discount"]
        return losses.n_step_target(*returns, chooser, outputs_tpk, double_q=True)

    def munchausen_target(batch: Transitions, online: Values, target: Values) -> jax.Array:
        outputs_tpk = target(batch.observation_tpk)
        value = munchausen.soft_value(mean(outputs_tpk), outputs_tpk if options.quantiles else None)
        bonuses = munchausen.bonus(mean(target(batch.observation_t)))
        bonus = losses.per_row(losses.select_action_value(bonuses, batch.columns["action"]), value.ndim)
        returns = batch.columns["n_step_return"], batch.columns["discount"]
        return bonus + losses.bootstrapped(*returns, value)

    if options.munchausen:
        values: tuple[Values, Values] = (lambda q: q - munchausen.bonus(q), munchausen.soft_value)
        return Estimator(mean, *values, munchausen_target, loss, options.quantiles)
    return Estimator(mean, _same, _largest, plain_target, loss, options.quantiles)


def _categorical(options: AlgorithmConfig) -> Estimator:
    returns = jnp.linspace(options.lowest_return, options.highest_return, options.atoms)
    mean: Values = partial(categorical.means, returns=returns)

    def target(batch: Transitions, online: Values, target: Values) -> jax.Array:
        logits = target(batch.observation_tpk)
        action = jnp.argmax(mean(online(batch.observation_tpk) if options.double_q else logits), axis=-1)
        p = jax.nn.softmax(losses.select_action_value(logits, action))
        sums = batch.columns["n_step_return"], batch.columns["discount"]
        moved = losses.bootstrapped(*sums, jnp.broadcast_to(returns, p.shape))
        return categorical.log_projection(p, moved, returns)

    def loss(logits_t: jax.Array, log_target: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.mean(weights * categorical.cross_entropies(logits_t, log_target))

    return Estimator(mean, _same, _largest, target, loss, options.atoms)


def _same(values: jax.Array) -> jax.Array:
    return values


_largest: Values = partial(jnp.max, axis=-1)
_mean_of_quantiles: Values = partial(jnp.mean, axis=-1)
