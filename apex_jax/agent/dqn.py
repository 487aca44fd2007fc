"""Ape-X DQN (Horgan et al. 2018): double Q-learning with n-step returns and a ladder of epsilons.

Options that the paper does not have, all off by default: Munchausen targets, quantiles and categorical returns, see
`estimator.py`, and layer normalization (`networks.py`).
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
from apex_jax.agent.estimator import Estimator, make_estimator
from apex_jax.agent.exploration import epsilon_ladder
from apex_jax.agent.frame_store import FrameStore, Transitions, gather
from apex_jax.agent.moments import Moments, add_observations, flat_numbers, initial_moments, normalized
from apex_jax.agent.networks import make_q_network
from apex_jax.agent.training import make_optimizer, make_update, maybe_copy_target
from apex_jax.config import Config
from apex_jax.host.errors import UsageError
from apex_jax.types import NUMBERS, Observation, SegmentSpec, joined, named_parts


class LearnerState(NamedTuple):
    """Everything that learning changes. Online and target parameters start equal, in separate buffers."""

    online_params: Params
    target_params: Params
    opt_state: Any
    updates: jax.Array  # int32[], number of updates so far


class NormalizingState(NamedTuple):
    """`LearnerState` of a learner that normalizes observations."""

    online_params: Params
    target_params: Params
    opt_state: Any
    updates: jax.Array
    moments: Moments  # of the drawn observations


def make_dqn(
    config: Config, spec: SegmentSpec, compute_dtype: Any = jnp.float32, estimator: Estimator | None = None
) -> Algorithm:
    """Returns the algorithm for this configuration. `compute_dtype`: dtype of the network's activations.

    `estimator`: meaning and loss of the network's outputs; None: those that `config.algorithm` chooses. Raises
    UsageError for one with action masks, which only those of this package read.
    """
    if spec.action.is_masked and (estimator is not None or config.algorithm.atoms):
        what = f"does not know the action masks of environment.task={config.environment.task}; leave it out"
        raise UsageError(f"algorithm.{'name' if estimator is not None else 'atoms'}: its estimator {what}")
    estimator, num_actions = estimator or make_estimator(config.algorithm), spec.action.num_actions
    network = make_q_network(config.network, num_actions, compute_dtype, estimator.outputs)
    optimizer = make_optimizer(config.learner)
    is_normalized = config.network.normalize_observations and spec.vector_size > 0

    def with_moments(params: Params, state: Any) -> Params:
        """Returns what an actor needs: params of the network and, if observations are normalized, their moments."""
        if not is_normalized:
            return params
        return {"network": params, "observations": {"mean": state.moments.mean, "variance": state.moments.variance}}

    def outputs(params: Params, observation: Observation) -> jax.Array:
        """Returns q-values float32[B, A], or N numbers for each, float32[B, A, N]. `params`: see `with_moments`."""
        seen, mask = split_mask(observation)
        if is_normalized:
            parts = named_parts(seen)
            numbers = normalized(flat_numbers(seen), **params["observations"])
            seen = joined(parts | {NUMBERS: jnp.reshape(numbers, parts[NUMBERS].shape)})
            params = params["network"]
        return masked(cast(jax.Array, network.apply(params, seen)), mask)

    def q_values(params: Params, observation: Observation) -> jax.Array:
        return estimator.mean(outputs(params, observation))

    def init(key: jax.Array) -> LearnerState | NormalizingState:
        seen = split_mask(jax.tree.map(jnp.asarray, spec.zeros(1)))[0]
        params = network.init(key, seen)
        target_params = jax.tree.map(jnp.copy, params)  # a buffer cannot be donated twice
        state = LearnerState(params, target_params, optimizer.init(params), jnp.zeros((), jnp.int32))
        return NormalizingState(*state, initial_moments(flat_numbers(seen).size)) if is_normalized else state

    def act(params: Params, observation: Observation, epsilon: jax.Array, key: jax.Array, step: int) -> Action:
        q, mask = q_values(params, observation), split_mask(observation)[1]
        explore_key, action_key = jax.random.split(jax.random.fold_in(key, step))
        explore = jax.random.uniform(explore_key, epsilon.shape) < epsilon
        random_action = random_actions(action_key, len(epsilon), num_actions, mask)
        action = jnp.where(explore, random_action, jnp.argmax(q, axis=-1)).astype(jnp.int32)
        return Action(action, losses.select_action_value(estimator.action_values(q), action), estimator.state_value(q))

    def greedy(params: Params, observation: Observation) -> dict[str, jax.Array]:
        q = q_values(params, observation)
        return {"action": jnp.argmax(q, axis=-1).astype(jnp.int32), "q_values": estimator.action_values(q)}

    def loss(
        online_params: Params, target_params: Params, batch: Transitions, weights: jax.Array
    ) -> tuple[jax.Array, tuple]:
        outputs_t = losses.select_action_value(outputs(online_params, batch.observation_t), batch.columns["action"])
        targets = estimator.target(batch, partial(outputs, online_params), partial(outputs, target_params))
        td_error = estimator.mean(targets) - estimator.mean(outputs_t)
        value = estimator.loss(outputs_t, targets, weights)
        return value, (losses.priority(td_error), estimator.mean(outputs_t).mean())

    def update_once(
        state: Any, store: FrameStore, indices: jax.Array, weights: jax.Array, learning_rate_share: jax.Array
    ) -> tuple[Any, UpdateOutput]:
        batch = gather(store, indices, spec.frame_stack)
        if is_normalized:
            state = state._replace(moments=add_observations(state.moments, flat_numbers(batch.observation_t)))
        target_params = with_moments(state.target_params, state)
        gradient = jax.value_and_grad(lambda params, *others: loss(with_moments(params, state), *others), has_aux=True)
        (value, (priorities, q_value)), grads = gradient(state.online_params, target_params, batch, weights)
        deltas, opt_state = optimizer.update(grads, state.opt_state, state.online_params)
        deltas = optax.tree.scale(learning_rate_share, deltas)
        online_params = optax.apply_updates(state.online_params, deltas)
        updates = state.updates + 1
        metrics = {
            "losses/td_loss": value,  # weighted, mean over the batch
            "losses/q_values": q_value,  # mean of q(s_t, a_t)
            "losses/gradient_norm": optax.tree.norm(grads),  # global, before clipping
        }
        state = state._replace(online_params=online_params, opt_state=opt_state, updates=updates)
        return state, UpdateOutput(priorities, metrics)

    def copy_target(is_due: jax.Array, state: Any) -> Any:
        return state._replace(target_params=maybe_copy_target(is_due, state.online_params, state.target_params))

    interval, has_convolutions = config.learner.target_update_interval, len(spec.frame_shape) > 1
    update = make_update(update_once, copy_target, interval, has_convolutions)
    return Algorithm(
        init=jax.jit(init),
        act=jax.jit(act),
        update=jax.jit(update, donate_argnums=0),
        acting_params=lambda state: with_moments(state.online_params, state),
        exploration=lambda size: epsilon_ladder(size, config.actor.base_epsilon, config.actor.epsilon_exponent),
        evaluation_exploration=config.evaluator.epsilon,
        greedy=greedy,
    )
