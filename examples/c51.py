"""A loss of your own: C51 (Bellemare et al. 2017), the return of each action as a distribution over fixed atoms.

    python main.py --config cartpole algorithm.name=examples.c51:make

Ape-X DQN with another estimator: it says what the outputs of the network mean, what they should become, and how wrong
they are (apex_jax/agent/estimator.py). `algorithm.settings={atoms: 101, lowest: -10, highest: 10}` changes the atoms.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.estimator import Estimator, Values
from apex_jax.agent.frame_store import Transitions
from apex_jax.agent.losses import per_row, select_action_value
from apex_jax.config import Config
from apex_jax.types import SegmentSpec

TINY = 1e-30  # keeps the logarithm of a probability finite


def make(config: Config, spec: SegmentSpec, compute_dtype: Any) -> Algorithm:
    """Returns the algorithm as the functions that actors and learner call."""
    settings = {"atoms": 51, "lowest": 0.0, "highest": 100.0} | json.loads(config.algorithm.settings)
    return make_dqn(config, spec, compute_dtype, c51_estimator(**settings))


def c51_estimator(atoms: int, lowest: float, highest: float) -> Estimator:
    """Returns the estimator whose outputs are the logits of the atoms: float32[B, A, atoms]."""
    returns = jnp.linspace(lowest, highest, atoms)  # z_i
    spacing = (highest - lowest) / (atoms - 1)

    def mean(logits: jax.Array) -> jax.Array:
        """q(s, a) = sum_i p_i(s, a) z_i: [..., atoms] -> [...]."""
        return jax.nn.softmax(logits) @ returns

    def target(batch: Transitions, online: Values, target: Values) -> jax.Array:
        """Returns log p of r + gamma z, projected to the atoms: float32[B, atoms]."""
        action = jnp.argmax(mean(online(batch.observation_tpk)), axis=-1)  # double Q-learning
        p = jax.nn.softmax(select_action_value(target(batch.observation_tpk), action))
        n_step_return, discount = (per_row(batch.columns[name], 2) for name in ("n_step_return", "discount"))
        moved = jnp.clip(n_step_return + discount * returns, lowest, highest)
        # Each atom's probability is split between the two atoms that its new place lies between.
        parts = jnp.maximum(0, 1 - jnp.abs(moved[:, :, None] - returns) / spacing)  # [B, from, to]
        return jax.lax.stop_gradient(jnp.log((p[:, :, None] * parts).sum(axis=1) + TINY))

    def loss(logits_t: jax.Array, target: jax.Array, weights: jax.Array) -> jax.Array:
        """The weighted cross entropy."""
        return -jnp.mean(weights * (jnp.exp(target) * jax.nn.log_softmax(logits_t)).sum(axis=-1))

    return Estimator(
        mean=mean,
        action_values=lambda q: q,
        state_value=lambda q: q.max(axis=-1),
        target=target,
        loss=loss,
        outputs=atoms,
    )
