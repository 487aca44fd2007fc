"""The q-network of Ape-X DQN: dueling (Wang et al. 2016) on the convolutions of Mnih et al. 2015."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from apex_jax.config import NetworkConfig


class QNetwork(nn.Module):
    """Maps observations to q-values.

    Dueling: q(s, a) = v(s) + A(s, a) - mean_a A(s, a). Pixels (uint8[B, F, H, W]) are scaled to [0, 1] and go through
    the convolutions; vector observations (float32[B, F, D]) go directly to the hidden layer. Parameters are float32,
    activations have `dtype`, and the returned q-values are float32[B, num_actions].
    """

    config: NetworkConfig
    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Returns q-values, float32[B, num_actions]."""
        x = observation
        if x.dtype == jnp.uint8:
            x = jnp.moveaxis(x, 1, -1).astype(self.dtype) / 255  # transposed while still uint8, which moves fewer bytes
            layers = zip(self.config.channels, self.config.kernel_sizes, self.config.strides, strict=True)
            for features, kernel, stride in layers:
                conv = nn.Conv(features, (kernel, kernel), (stride, stride), padding="VALID", dtype=self.dtype)
                x = nn.relu(conv(x))
        x = x.reshape(len(x), -1).astype(self.dtype)
        if not self.config.dueling:
            hidden = nn.relu(nn.Dense(self.config.hidden_units, dtype=self.dtype, name="hidden")(x))
            return nn.Dense(self.num_actions, dtype=jnp.float32, name="q")(hidden)
        # The hidden layers of both streams read the same input: one matrix product instead of two.
        hidden = nn.relu(nn.Dense(2 * self.config.hidden_units, dtype=self.dtype, name="hidden")(x))
        for_value, for_advantage = jnp.split(hidden, 2, axis=-1)
        value = nn.Dense(1, dtype=jnp.float32, name="value")(for_value)
        advantage = nn.Dense(self.num_actions, dtype=jnp.float32, name="advantage")(for_advantage)
        return value + advantage - advantage.mean(axis=-1, keepdims=True)
