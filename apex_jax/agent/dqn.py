"""Ape-X DQN (Horgan et al. 2018): double Q-learning with n-step returns and a ladder of epsilons.

Options that the paper does not have, all off by default: Munchausen targets, rescaled values and quantiles, which
`estimator.py` combines, and layer normalization (`networks.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from apex_jax.agent import losses
from apex_jax.agent.action_masks import masked, random_actions, split_mask
from apex_jax.agent.algorithm import Action, Algorithm, Params, UpdateOutput
from apex_jax.agent.devices import jit_update, mean_over_devices
from apex_jax.agent.estimator import Estimator, make_estimator
from apex_jax.agent.exploration import epsilon_ladder
from apex_jax.agent.frame_store import FrameStore, Transitions, gather
from apex_jax.agent.networks import make_q_network
from apex_jax.agent.training import make_optimizer, maybe_copy_target, scan_updates_with_target
from apex_jax.config import Config
from apex_jax.host.errors import UsageError
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
    estimator: Estimator | None = None,
) -> Algorithm:
    """Returns the algorithm for this configuration. `compute_dtype`: dtype of the network's activations.

    `estimator`: meaning and loss of the network's outputs; None: those that `config.algorithm` chooses. Raises
    UsageError for one with action masks, which only those of this package read.
    """
    if estimator is not None and spec.action.is_masked:
        what = f"its estimator does not know the action masks of environment.task={config.environment.task}"
        raise UsageError(f"algorithm.name={config.algorithm.name}: {what}; leave algorithm.name out")
    estimator, num_actions = estimator or make_estimator(config.algorithm), spec.action.num_actions
    network = make_q_network(config.network, num_actions, compute_dtype, estimator.outputs)
    optimizer = make_optimizer(config.learner)

    def outputs(params: Params, observation: jax.Array) -> jax.Array:
        """Returns q-values float32[B, A], or the quantiles of each, float32[B, A, N]."""
        seen, mask = split_mask(observation, spec)
        return masked(cast(jax.Array, network.apply(params, seen)), mask)

    def q_values(params: Params, observation: jax.Array) -> jax.Array:
        return estimator.mean(outputs(params, observation))

    def init(key: jax.Array) -> LearnerState:
        observation = jnp.zeros((1, spec.frame_stack, *spec.frame_shape), spec.frame_dtype)
        params = network.init(key, split_mask(observation, spec)[0])
        target_params = jax.tree.map(jnp.copy, params)  # a buffer cannot be donated twice
        return LearnerState(params, target_params, optimizer.init(params), jnp.zeros((), jnp.int32))

    def act(params: Params, observation: jax.Array, epsilon: jax.Array, key: jax.Array, step: int) -> Action:
        q, mask = q_values(params, observation), split_mask(observation, spec)[1]
        explore_key, action_key = jax.random.split(jax.random.fold_in(key, step))
        explore = jax.random.uniform(explore_key, epsilon.shape) < epsilon
        random_action = random_actions(action_key, len(epsilon), num_actions, mask)
        action = jnp.where(explore, random_action, jnp.argmax(q, axis=-1)).astype(jnp.int32)
        return Action(action, losses.select_action_value(estimator.action_values(q), action), estimator.state_value(q))

    def greedy(params: Params, observation: jax.Array) -> dict[str, jax.Array]:
        q = q_values(params, observation)
        return {"action": jnp.argmax(q, axis=-1).astype(jnp.int32), "q_values": estimator.action_values(q)}

    def loss(
        online_params: Params, target_params: Params, batch: Transitions, weights: jax.Array
    ) -> tuple[jax.Array, tuple]:
        outputs_t = losses.select_action_value(outputs(online_params, batch.observation_t), batch.columns["action"])
        targets = estimator.target(batch, partial(outputs, online_params), partial(outputs, target_params))
        td_error = estimator.mean(targets) - estimator.mean(outputs_t)
        value = estimator.loss(outputs_t, targets, weights)
        return value, (losses.priority(td_error), outputs_t.mean())

    def update_once(
        state: LearnerState, store: FrameStore, indices: jax.Array, weights: jax.Array, learning_rate_share: jax.Array
    ) -> tuple[LearnerState, UpdateOutput]:
        batch = gather(store, indices, spec.frame_stack)
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, (priorities, q_value)), grads = gradient(state.online_params, state.target_params, batch, weights)
        grads, value, q_value = mean_over_devices((grads, value, q_value), config.learner.devices)
        deltas, opt_state = optimizer.update(grads, state.opt_state, state.online_params)
        deltas = optax.tree.scale(learning_rate_share, deltas)
        online_params = optax.apply_updates(state.online_params, deltas)
        updates = state.updates + 1
        metrics = {
            "losses/td_loss": value,  # weighted, mean over the batch
            "losses/q_values": q_value,  # mean of q(s_t, a_t)
            "losses/gradient_norm": optax.tree.norm(grads),  # global, before clipping
        }
        state = LearnerState(online_params, state.target_params, opt_state, updates)
        return state, UpdateOutput(priorities, metrics)

    def copy_target(is_due: jax.Array, state: LearnerState) -> LearnerState:
        return state._replace(target_params=maybe_copy_target(is_due, state.online_params, state.target_params))

    def update(
        state: LearnerState, store: FrameStore, indices: jax.Array, weights: jax.Array, learning_rate_share: jax.Array
    ) -> tuple[LearnerState, UpdateOutput]:
        def once(state: LearnerState, indices: jax.Array, weights: jax.Array) -> tuple[LearnerState, UpdateOutput]:
            return update_once(state, store, indices, weights, learning_rate_share)

        # In a loop, XLA would run convolutions on one core of a CPU; without them, a loop compiles in half the time.
        unrolled = jax.default_backend() == "cpu" and len(spec.frame_shape) > 1
        interval = config.learner.target_update_interval
        return scan_updates_with_target(once, copy_target, interval, state, indices, weights, unrolled)

    return Algorithm(
        init=jax.jit(init),
        act=jax.jit(act),
        update=jit_update(update, config.learner.devices),
        acting_params=lambda state: state.online_params,
        exploration=lambda size: epsilon_ladder(size, config.actor.base_epsilon, config.actor.epsilon_exponent),
        evaluation_exploration=config.evaluator.epsilon,
        greedy=greedy,
    )
