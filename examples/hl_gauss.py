"""A loss of your own: HL-Gauss (Farebrother et al. 2024), the return of each action as a histogram around its target.

    python main.py --config cartpole algorithm.atoms=0 algorithm.name=examples.hl_gauss:make

Ape-X DQN with another estimator: it says what the outputs of the network mean, what they should become, and how wrong
they are (apex_jax/agent/estimator.py). `algorithm.settings={bins: 101, lowest: -10, highest: 10}` changes the bins.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.estimator import Estimator, Values
from apex_jax.agent.frame_store import Transitions
from apex_jax.agent.losses import n_step_target
from apex_jax.config import Config
from apex_jax.types import SegmentSpec

TINY = 1e-30  # keeps the logarithm of a probability finite


def make(config: Config, spec: SegmentSpec, compute_dtype: Any) -> Algorithm:
    """Returns the algorithm as the functions that actors and learner call."""
    settings = {"bins": 51, "lowest": 0.0, "highest": 100.0} | json.loads(config.algorithm.settings)
    return make_dqn(config, spec, compute_dtype, histogram_estimator(**settings))


def histogram_estimator(bins: int, lowest: float, highest: float) -> Estimator:
    """Returns the estimator whose outputs are the logits of the bins: float32[B, A, bins]."""
    width = (highest - lowest) / bins
    edges = lowest + width * jnp.arange(bins + 1)
    centers = (edges[:-1] + edges[1:]) / 2

    def mean(logits: jax.Array) -> jax.Array:
        """q(s, a) = sum_i p_i(s, a) z_i: [..., bins] -> [...]."""
        return jax.nn.softmax(logits) @ centers

    def target(batch: Transitions, online: Values, target: Values) -> jax.Array:
        """Returns the logarithms of the shares of a normal distribution around G in the bins: float32[B, bins]."""
        returns = batch.columns["n_step_return"], batch.columns["discount"]
        q_online, q_target = mean(online(batch.observation_tpk)), mean(target(batch.observation_tpk))
        around = jnp.clip(n_step_target(*returns, q_online, q_target, double_q=True), centers[0], centers[-1])
        below = norm.cdf(edges, around[:, None], 0.75 * width)  # of each edge
        shares = jnp.diff(below) / (below[:, -1:] - below[:, :1])
        return jax.lax.stop_gradient(jnp.log(shares + TINY))

    def loss(logits_t: jax.Array, target: jax.Array, weights: jax.Array) -> jax.Array:
        """The weighted cross entropy."""
        return -jnp.mean(weights * (jnp.exp(target) * jax.nn.log_softmax(logits_t)).sum(axis=-1))

    return Estimator(
        mean=mean,
        action_values=lambda q: q,
        state_value=lambda q: q.max(axis=-1),
        target=target,
        loss=loss,
        outputs=bins,
    )
