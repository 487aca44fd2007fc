"""An algorithm of your own, from its parts: soft Q-learning (Haarnoja et al. 2017); it learns CartPole in a minute.

    python main.py --config cartpole algorithm.name=examples.soft_q_learning:make total_updates=24000 \\
        learner.learning_rate=2e-3

Each environment of the ladder acts by a softmax over the q-values with a temperature of its own, targets are soft
maxima, and the target network follows slowly. Environments, segments, prioritized replay and evaluation are Ape-X's.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from apex_jax.agent import losses
from apex_jax.agent.algorithm import Action, Algorithm, Params, UpdateOutput
from apex_jax.agent.frame_store import FrameStore, gather
from apex_jax.agent.networks import make_q_network
from apex_jax.agent.training import make_optimizer, scan_updates
from apex_jax.config import Config
from apex_jax.types import SegmentSpec

TEMPERATURE = 0.02  # of the soft maximum, and of the last environment of the ladder
TARGET_STEP = 0.005  # of the target parameters towards the online ones, at each update


class State(NamedTuple):
    """Everything that learning changes; checkpoints hold it."""

    online_params: Params
    target_params: Params
    opt_state: Any


def soft_maximum(q: jax.Array) -> jax.Array:
    """Returns temperature times log sum_a exp(q_a / temperature): float32[B, num_actions] -> [B]."""
    return TEMPERATURE * jax.nn.logsumexp(q / TEMPERATURE, axis=-1)


def make(config: Config, spec: SegmentSpec, compute_dtype: Any) -> Algorithm:
    """Returns the algorithm as the functions that actors and learner call."""
    network = make_q_network(config.network, spec.action.num_actions, compute_dtype)
    optimizer = make_optimizer(config.learner)

    def q_values(params: Params, observation: jax.Array) -> jax.Array:
        return cast(jax.Array, network.apply(params, observation))

    def init(key: jax.Array) -> State:
        params = network.init(key, jnp.zeros((1, spec.frame_stack, *spec.frame_shape), spec.frame_dtype))
        return State(params, jax.tree.map(jnp.copy, params), optimizer.init(params))

    def act(params: Params, observation: jax.Array, temperature: jax.Array, key: jax.Array, step: int) -> Action:
        q = q_values(params, observation)
        action = jax.random.categorical(jax.random.fold_in(key, step), q / temperature[:, None]).astype(jnp.int32)
        return Action(action, losses.select_action_value(q, action), soft_maximum(q))

    def update_once(
        state: State, store: FrameStore, indices: jax.Array, weights: jax.Array, share: float
    ) -> tuple[State, UpdateOutput]:
        batch = gather(store, indices, spec.frame_stack)  # observations, and the columns of the transitions
        next_value = soft_maximum(q_values(state.target_params, batch.observation_tpk))
        target = batch.columns["n_step_return"] + batch.columns["discount"] * next_value

        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            q = losses.select_action_value(q_values(params, batch.observation_t), batch.columns["action"])
            return jnp.mean(weights * optax.huber_loss(target - q)), jnp.abs(target - q)

        (value, priorities), grads = jax.value_and_grad(loss, has_aux=True)(state.online_params)
        steps, opt_state = optimizer.update(grads, state.opt_state, state.online_params)
        online = optax.apply_updates(state.online_params, optax.tree.scale(share, steps))
        follower = optax.incremental_update(online, state.target_params, TARGET_STEP)
        return State(online, follower, opt_state), UpdateOutput(priorities, {"losses/td_loss": value})

    def update(
        state: State, store: FrameStore, indices: jax.Array, weights: jax.Array, share: float
    ) -> tuple[State, UpdateOutput]:
        def once(state: State, indices: jax.Array, weights: jax.Array) -> tuple[State, UpdateOutput]:
            return update_once(state, store, indices, weights, share)

        return scan_updates(once, state, indices, weights, unrolled=True)  # the K batches of a call

    return Algorithm(
        init=jax.jit(init),
        act=jax.jit(act),
        update=jax.jit(update, donate_argnums=0),
        acting_params=lambda state: state.online_params,
        exploration=lambda size: np.geomspace(1.0, TEMPERATURE, size).astype(np.float32),
        evaluation_exploration=TEMPERATURE,
    )
