"""Ape-X DQN (Horgan et al. 2018): double Q-learning with n-step returns, epsilon-greedy over a ladder.

Options that the paper does not have, all off by default: Munchausen targets (`munchausen.py`), rescaled values
(`value_rescaling.py`), and layer normalization (`networks.py`). With the first two together, the policy, the bonus m
and the soft value V are those of the network's own scale:

    G = m(S_t, A_t) + h(sum_{j<k} gamma^j r_{t+j+1} + gamma^k h^-1(V(S_{t+k})))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from apex_jax.agent import losses, munchausen, value_rescaling
from apex_jax.agent.algorithm import Action, Algorithm, Params, UpdateOutput
from apex_jax.agent.exploration import epsilon_ladder
from apex_jax.agent.frame_store import FrameStore, Transitions, gather
from apex_jax.agent.networks import QNetwork
from apex_jax.agent.training import copied_if, in_turn, make_optimizer
from apex_jax.config import Config, NetworkConfig
from apex_jax.types import SegmentSpec


class LearnerState(NamedTuple):
    """Everything that learning changes. Online and target parameters start equal, in separate buffers."""

    online_params: Params
    target_params: Params
    opt_state: Any
    updates: jax.Array  # int32[], number of updates so far


def make_dqn(
    config: Config,
    spec: SegmentSpec,
    compute_dtype: Any = jnp.float32,
    network_class: Callable[[NetworkConfig, int, Any], nn.Module] = QNetwork,
) -> Algorithm:
    """Returns the algorithm for this configuration. `compute_dtype`: dtype of the network's activations.

    `network_class`: makes the network of a configuration, for so many actions; it takes and returns what `QNetwork`
    does, and its parameters are float32.
    """
    num_actions = spec.action.num_actions
    network = network_class(config.network, num_actions, compute_dtype)
    optimizer = make_optimizer(config.learner)
    options = config.algorithm
    h, inverse_h = (value_rescaling.rescaled, value_rescaling.unscaled) if options.value_rescaling else (_same, _same)

    def q_values(params: Params, observation: jax.Array) -> jax.Array:
        return cast(jax.Array, network.apply(params, observation))

    def estimates(q: jax.Array) -> jax.Array:
        """Returns the estimated return of each action, without a bonus for it, in the scale of the rewards."""
        return inverse_h(q - munchausen.bonus(q) if options.munchausen else q)

    def state_value(q: jax.Array) -> jax.Array:
        """Returns what a target bootstraps from, float32[B], in the scale of the rewards."""
        return inverse_h(munchausen.soft_value(q) if options.munchausen else q.max(axis=-1))

    def init(key: jax.Array) -> LearnerState:
        observation = jnp.zeros((1, spec.frame_stack, *spec.frame_shape), spec.frame_dtype)
        params = network.init(key, observation)
        target_params = jax.tree.map(jnp.copy, params)  # a buffer cannot be donated twice
        return LearnerState(params, target_params, optimizer.init(params), jnp.zeros((), jnp.int32))

    def act(params: Params, observation: jax.Array, epsilon: jax.Array, key: jax.Array, step: int) -> Action:
        q = q_values(params, observation)
        explore_key, action_key = jax.random.split(jax.random.fold_in(key, step))
        explore = jax.random.uniform(explore_key, epsilon.shape) < epsilon
        random_action = jax.random.randint(action_key, epsilon.shape, 0, num_actions)
        action = jnp.where(explore, random_action, jnp.argmax(q, axis=-1)).astype(jnp.int32)
        return Action(action, losses.select_action_value(estimates(q), action), state_value(q))

    def greedy(params: Params, observation: jax.Array) -> dict[str, jax.Array]:
        q = q_values(params, observation)
        return {"action": jnp.argmax(q, axis=-1).astype(jnp.int32), "q_values": estimates(q)}

    def target(online_params: Params, target_params: Params, batch: Transitions) -> jax.Array:
        columns = batch.columns
        returns = columns["n_step_return"], columns["discount"]
        if options.munchausen:
            q_target_t, q_target_tpk = (
                q_values(target_params, each) for each in (batch.observation_t, batch.observation_tpk)
            )
            bonus = losses.select_action_value(munchausen.bonus(q_target_t), columns["action"])
            return bonus + h(losses.bootstrapped(*returns, inverse_h(munchausen.soft_value(q_target_tpk))))
        q_online_tpk = q_values(jax.lax.stop_gradient(online_params), batch.observation_tpk)
        q_target_tpk = q_values(target_params, batch.observation_tpk)
        return h(losses.n_step_target(*returns, q_online_tpk, inverse_h(q_target_tpk), options.double_q))

    def loss(
        online_params: Params, target_params: Params, batch: Transitions, weights: jax.Array
    ) -> tuple[jax.Array, tuple]:
        q_t = losses.select_action_value(q_values(online_params, batch.observation_t), batch.columns["action"])
        td_error = target(online_params, target_params, batch) - q_t
        return losses.weighted_loss(td_error, weights, options.loss), (losses.priority(td_error), q_t.mean())

    def update_once(
        state: LearnerState, store: FrameStore, indices: jax.Array, weights: jax.Array, learning_rate_share: jax.Array
    ) -> tuple[LearnerState, UpdateOutput]:
        batch = gather(store, indices, spec.frame_stack)
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, (priorities, q_value)), grads = gradient(state.online_params, state.target_params, batch, weights)
        deltas, opt_state = optimizer.update(grads, state.opt_state, state.online_params)
        deltas = optax.tree.scale(learning_rate_share, deltas)
        online_params = optax.apply_updates(state.online_params, deltas)
        updates = state.updates + 1
        interval = config.learner.target_update_interval
        target_params = copied_if(updates % interval == 0, online_params, state.target_params)
        metrics = {
            "losses/td_loss": value,  # weighted, mean over the batch
            "losses/q_values": q_value,  # mean of q(s_t, a_t)
            "losses/gradient_norm": optax.tree.norm(grads),  # global, before clipping
        }
        return LearnerState(online_params, target_params, opt_state, updates), UpdateOutput(priorities, metrics)

    def update(
        state: LearnerState, store: FrameStore, indices: jax.Array, weights: jax.Array, learning_rate_share: jax.Array
    ) -> tuple[LearnerState, UpdateOutput]:
        def once(state: LearnerState, indices: jax.Array, weights: jax.Array) -> tuple[LearnerState, UpdateOutput]:
            return update_once(state, store, indices, weights, learning_rate_share)

        # In a loop, XLA would run convolutions on one core of a CPU.
        return in_turn(once, state, indices, weights, unrolled=jax.default_backend() == "cpu")

    return Algorithm(
        init=jax.jit(init),
        act=jax.jit(act),
        update=jax.jit(update, donate_argnums=0),
        acting_params=lambda state: state.online_params,
        exploration=lambda size: epsilon_ladder(size, config.actor.base_epsilon, config.actor.epsilon_exponent),
        evaluation_exploration=config.evaluator.epsilon,
        greedy=greedy,
    )


def _same(values: jax.Array) -> jax.Array:
    return values
