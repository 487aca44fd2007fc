"""A bonus for what is new: random network distillation (Burda et al. 2019), around DQN or DPG.

    python main.py --config mountain_car algorithm.name=examples.random_network_distillation:make

A network learns to predict the outputs of a random one; where it errs, an observation is new. That error, in units of
its running standard deviation and times `algorithm.settings={scale: 0.1}`, is added to the rewards that are replayed.
"""

import json
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from apex_jax.agent.algorithm import Algorithm, Params, UpdateOutput
from apex_jax.agent.dpg import make_dpg
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.frame_store import FrameStore, gather
from apex_jax.config import Config
from apex_jax.types import SegmentSpec

FEATURES, DECAY = 64, 0.999


class State(NamedTuple):
    """Everything that learning changes, and the random network; checkpoints hold it."""

    agent: Any
    random: Params
    predictor: Params
    opt_state: Any
    square: jax.Array  # float32[], running mean of the squared errors


def make(config: Config, spec: SegmentSpec, compute_dtype: Any) -> Algorithm:
    """Returns the algorithm as the functions that actors and learner call."""
    scale = {"scale": 0.1, **json.loads(config.algorithm.settings)}["scale"]
    agent = (make_dqn if spec.action.dtype == "int32" else make_dpg)(config, spec, compute_dtype)
    network, optimizer = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(FEATURES)]), optax.adam(1e-4)

    def features(params: Params, observation: jax.Array) -> jax.Array:
        newest = observation[:, -1].reshape(len(observation), -1)
        return jnp.asarray(network.apply(params, newest / 255 if newest.dtype == jnp.uint8 else newest))

    def init(key: jax.Array) -> State:
        keys, x = jax.random.split(key, 3), jnp.zeros((1, math.prod(spec.frame_shape)))
        random, predictor = network.init(keys[1], x), network.init(keys[2], x)
        return State(agent.init(keys[0]), random, predictor, optimizer.init(predictor), jnp.ones(()))

    def update(
        state: State, store: FrameStore, indices: jax.Array, weights: jax.Array, learning_rate_share: float
    ) -> tuple[State, UpdateOutput]:
        drawn = indices.reshape(-1)
        observation = gather(store, drawn, spec.frame_stack).observation_tpk

        def loss(predictor: Params) -> tuple[jax.Array, jax.Array]:
            error = jnp.square(features(predictor, observation) - features(state.random, observation)).mean(axis=-1)
            return error.mean(), error

        (_, error), grads = jax.value_and_grad(loss, has_aux=True)(state.predictor)
        deltas, opt_state = optimizer.update(grads, state.opt_state)
        square = DECAY * state.square + (1 - DECAY) * jnp.square(error).mean()
        bonus = scale * error / jnp.sqrt(square)
        returns = jnp.asarray(store.columns["n_step_return"])
        with_bonus = returns.reshape(-1).at[drawn].set(returns.reshape(-1)[drawn] + bonus).reshape(returns.shape)
        store = store._replace(columns=store.columns | {"n_step_return": with_bonus})
        inner, output = agent.update(state.agent, store, indices, weights, learning_rate_share)
        metrics = output.metrics | {"own/bonus": bonus.reshape(indices.shape).mean(axis=1)}
        predictor = optax.apply_updates(state.predictor, deltas)
        return State(inner, state.random, predictor, opt_state, square), output._replace(metrics=metrics)

    return agent._replace(
        init=jax.jit(init),
        update=jax.jit(update, donate_argnums=0),
        acting_params=lambda state: agent.acting_params(state.agent),
    )
