"""The networks: q-values of Ape-X DQN, dueling (Wang et al. 2016) on the convolutions of Mnih et al. 2015; policy and
critic of Ape-X DPG.

`make_q_network` and `make_policy_and_critic` make these, or the classes of the user that `network.name` names.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from apex_jax.agent.space_to_depth import BlockConvolution, block_size
from apex_jax.config import IMPALA_OUTPUTS, NetworkConfig
from apex_jax.config.keys import names_code
from apex_jax.host.errors import UsageError
from apex_jax.host.user_code import imported_names
from apex_jax.types import FRAMES, Observation, named_parts


def make_q_network(config: NetworkConfig, num_actions: int, dtype: Any = jnp.float32, outputs: int = 0) -> nn.Module:
    """Returns the network of DQN: a `QNetwork`, or the user's class, which is made with the same arguments.

    `outputs`: how many numbers replace the q-value of each action; 0: none, and the user's class does not get this
    argument. Raises UsageError if there is no such class.
    """
    [network_class] = _classes(config, QNetwork)
    return network_class(config, num_actions, dtype, *([outputs] if outputs else []))


def make_policy_and_critic(
    config: NetworkConfig, action_size: int, dtype: Any = jnp.float32
) -> tuple[nn.Module, nn.Module]:
    """Returns the networks of DPG: `Policy` and `Critic`, or the user's. Raises UsageError if those are not two."""
    policy_class, critic_class = _classes(config, Policy, Critic)
    return policy_class(config, action_size, dtype), critic_class(config, dtype)


def _classes(config: NetworkConfig, *classes: type[nn.Module]) -> list[Any]:
    if not names_code(config.name):
        return list(classes)
    found = imported_names("network.name", config.name)
    if len(found) != len(classes):
        names = ",".join(each.__name__ for each in classes)
        form = f"must be MODULE:{'CLASS,' * (len(classes) - 1)}CLASS, in place of {names}"
        raise UsageError(f"network.name={config.name}: {form}")
    return found


class PixelTorso:
    """The convolutions of pixels, as methods of a Flax module, whose layers they are."""

    config: NetworkConfig
    dtype: Any

    def _features(self, x: jax.Array) -> jax.Array:
        """Maps pixels uint8[B, F, H, W, ...] to the torso's output, dtype[B, Y, X, channels]."""
        is_impala = self.config.torso == "impala"
        if not self.config.channels:
            x = self._scaled(x)
        else:
            x = self._impala(self._scaled(x)) if is_impala else self._convolutions(x)
            if self.config.layer_norm:
                axes = (-3, -2, -1)
                x = nn.LayerNorm(dtype=self.dtype, reduction_axes=axes, feature_axes=axes, name="torso_norm")(x)
            x = nn.relu(x)
        return adaptive_max_pool(x, IMPALA_OUTPUTS) if is_impala else x

    def _scaled(self, observation: jax.Array) -> jax.Array:
        """Returns pixels uint8[B, F, H, W, ...] in [0, 1], with the frames among the channels: dtype[B, H, W, C]."""
        x = jnp.moveaxis(observation, 1, 3)  # transposed while still uint8, which moves fewer bytes
        return x.reshape(*x.shape[:3], -1).astype(self.dtype) / 255

    def _convolutions(self, observation: jax.Array) -> jax.Array:
        """Maps pixels uint8[B, F, H, W, ...] to the last convolution's output before its ReLU, dtype[B, H, W, C]."""
        layers = list(zip(self.config.channels, self.config.kernel_sizes, self.config.strides, strict=True))
        in_blocks = block_size(self.config) > 1
        x = observation if in_blocks else self._scaled(observation)
        for layer, (features, kernel, stride) in enumerate(layers):
            name = f"Conv_{layer}"
            if layer == 0 and in_blocks:
                x = BlockConvolution(features, kernel, stride, self.dtype, name=name)(x)
            else:
                sizes = (kernel, kernel), (stride, stride)
                x = nn.Conv(features, *sizes, padding="VALID", dtype=self.dtype, name=name)(x)
            x = nn.relu(x) if layer + 1 < len(layers) else x
        return x

    def _impala(self, x: jax.Array) -> jax.Array:
        """Returns the output of the residual torso of Espeholt et al. 2018 before its last ReLU.

        For each entry of `channels`: a convolution, a max-pooling that halves the image, two residual blocks.
        """
        for features in self.config.channels:
            conv = partial(nn.Conv, features, (3, 3), padding="SAME", dtype=self.dtype)
            x = nn.max_pool(conv()(x), (3, 3), (2, 2), padding="SAME")
            for _ in range(2):
                hidden = conv()(nn.relu(x))
                x = x + conv()(nn.relu(hidden))
        return x


class QNetwork(PixelTorso, nn.Module):
    """Maps observations to q-values.

    Dueling: q(s, a) = v(s) + A(s, a) - mean_a A(s, a). Pixels (uint8[B, F, H, W], or [B, F, H, W, C] in color) are
    scaled to [0, 1] and go through the convolutions; vectors (float32[B, F, D]) go directly to the hidden layer. Of
    observations that have both, which are a dict, the vectors join the outputs of the convolutions there. Parameters
    are float32, activations have `dtype`, and the returned q-values are float32[B, num_actions], or, if `outputs` is
    not 0, that many numbers for each action, float32[B, num_actions, outputs], such as the quantiles of its return, in
    both streams.

    `layer_norm` normalizes (Ba et al. 2016) before two of the ReLUs: the last one of the torso, over all outputs of an
    observation, and that of the hidden layer, over the units of each stream.
    """

    config: NetworkConfig
    num_actions: int
    dtype: Any = jnp.float32
    outputs: int = 0

    @nn.compact
    def __call__(self, observation: Observation) -> jax.Array:
        """Returns q-values, float32[B, num_actions], or float32[B, num_actions, outputs]."""
        parts = dict(named_parts(observation))
        if FRAMES in parts:
            parts[FRAMES] = self._features(parts[FRAMES])
        flat = [x.reshape(x.shape[0], -1).astype(self.dtype) for x in parts.values()]
        x = jnp.concatenate(flat, axis=-1)
        if not self.config.dueling:
            return self._head(self._hidden(x, streams=1), self.num_actions, "q")
        # The hidden layers of both streams read the same input: one matrix product instead of two.
        for_value, for_advantage = jnp.split(self._hidden(x, streams=2), 2, axis=-1)
        value, advantage = self._head(for_value, 1, "value"), self._head(for_advantage, self.num_actions, "advantage")
        return value + advantage - advantage.mean(axis=1, keepdims=True)

    def _head(self, hidden: jax.Array, actions: int, name: str) -> jax.Array:
        """Returns one output for each action, float32[B, actions], or several, float32[B, actions, outputs]."""
        output = nn.Dense(actions * max(1, self.outputs), dtype=jnp.float32, name=name)(hidden)
        return output.reshape(output.shape[0], actions, self.outputs) if self.outputs else output

    def _hidden(self, x: jax.Array, streams: int) -> jax.Array:
        """Returns the hidden layers of all streams side by side, dtype[B, streams x hidden_units]."""
        x = nn.Dense(streams * self.config.hidden_units, dtype=self.dtype, name="hidden")(x)
        if self.config.layer_norm:
            of_streams = x.reshape(x.shape[0], streams, self.config.hidden_units)
            norm = nn.LayerNorm(dtype=self.dtype, feature_axes=(-2, -1), name="hidden_norm")
            x = norm(of_streams).reshape(x.shape)
        return nn.relu(x)


def adaptive_max_pool(x: jax.Array, outputs: int) -> jax.Array:
    """Returns the maxima of a grid of windows: [B, H, W, C] -> [B, outputs, outputs, C].

    Output i of a side of n pixels is the maximum of the pixels from floor(i n / outputs) to before
    ceil((i + 1) n / outputs), so that windows may overlap, and repeat the pixels of a side that is smaller.
    """
    for axis in (1, 2):
        n = x.shape[axis]
        edges = [(i * n // outputs, -(-(i + 1) * n // outputs)) for i in range(outputs)]
        windows = [jax.lax.slice_in_dim(x, *edge, axis=axis).max(axis=axis, keepdims=True) for edge in edges]
        x = jnp.concatenate(windows, axis=axis)
    return x


class Encoder(PixelTorso, nn.Module):
    """The encoder of Ape-X DPG for pixels, before policy and critics: the torso, then a layer with values in (-1, 1).

    (Yarats et al. 2021, "Improving Sample Efficiency in Model-Free Reinforcement Learning from Images")
    """

    config: NetworkConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Maps pixels uint8[B, F, H, W, ...] to float32[B, hidden_units]."""
        x = self._features(observation)
        x = nn.Dense(self.config.hidden_units, dtype=self.dtype, name="hidden")(x.reshape(x.shape[0], -1))
        return jnp.tanh(nn.LayerNorm(dtype=jnp.float32, name="hidden_norm")(x))


class Torso(nn.Module):
    """The hidden layers of a policy or critic: float32[B, D] -> dtype[B, units[-1]], [B, units[0]] with `layer_norm`.

    Plain: dense layers with ReLU. With `layer_norm`: a dense layer of units[0], then for each further entry a residual
    block x + W relu(V LayerNorm(x)) with that many hidden units, then a last LayerNorm (the blocks of Lee et al. 2024,
    "SimBa"). `action` float32[B, A] joins before the second layer (Lillicrap et al. 2016), or before the first one if
    there are blocks.
    """

    units: tuple[int, ...]
    layer_norm: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, action: jax.Array | None = None) -> jax.Array:
        """Returns the last hidden layer."""
        joins_at = 0 if self.layer_norm else min(1, len(self.units) - 1)
        for layer, units in enumerate(self.units):
            if action is not None and layer == joins_at:
                x = jnp.concatenate([x, action], axis=-1)
            if self.layer_norm and layer > 0:
                hidden = nn.relu(nn.Dense(units, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
                x = x + nn.Dense(self.units[0], dtype=self.dtype)(hidden)
            else:
                x = nn.Dense(units, dtype=self.dtype)(x)
                x = x if self.layer_norm else nn.relu(x)
        return nn.LayerNorm(dtype=self.dtype)(x) if self.layer_norm else x


class Policy(nn.Module):
    """The deterministic policy of Ape-X DPG: pi(s) in (-1, 1)."""

    config: NetworkConfig
    action_size: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Maps float32[B, D] to actions, float32[B, action_size]."""
        x = Torso(self.config.policy_units, self.config.layer_norm, self.dtype, name="torso")(observation)
        return jnp.tanh(nn.Dense(self.action_size, dtype=jnp.float32, name="action")(x))


class Critic(nn.Module):
    """The critic of Ape-X DPG: q(s, a)."""

    config: NetworkConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Maps float32[B, D] and actions float32[B, A] to float32[B]."""
        x = Torso(self.config.critic_units, self.config.layer_norm, self.dtype, name="torso")(observation, action)
        return nn.Dense(1, dtype=jnp.float32, name="value")(x).squeeze(axis=-1)
