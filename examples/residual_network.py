"""A network of your own: residual blocks instead of one hidden layer; it learns CartPole in a minute.

    python main.py --config cartpole network.name=examples.residual_network:ResidualNetwork

A class of `network.name` is made with the arguments of `QNetwork` (apex_jax/agent/networks.py) and returns q-values
for observations. Its parameters are float32; actors, learner, evaluator, `load_policy` and exports use it by its name.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from apex_jax.config import NetworkConfig

BLOCKS = 2


class ResidualNetwork(nn.Module):
    """Blocks x + W relu(V LayerNorm(x)) between a first and a last dense layer."""

    config: NetworkConfig
    num_actions: int
    dtype: Any = jnp.float32  # of the activations

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Maps observations float32[B, F, D] to q-values float32[B, num_actions]."""
        units = self.config.hidden_units
        x = nn.Dense(units, dtype=self.dtype)(observation.reshape(observation.shape[0], -1))
        for _ in range(BLOCKS):
            hidden = nn.Dense(units, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            x = x + nn.Dense(units, dtype=self.dtype)(nn.relu(hidden))
        return nn.Dense(self.num_actions, dtype=jnp.float32)(nn.LayerNorm(dtype=self.dtype)(x))
