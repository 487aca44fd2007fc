"""A slow twin of Ape-X DPG: its networks with their gradients by hand, and whole updates, in float64.

Nothing here is taken from `apex_jax`. Parameters are named as flax names them, "torso/Dense_0/kernel" for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.rigs.reference import Adam, Arrays, Batch, RMSProp, clip_by_global_norm, loss_and_gradient

LAYER_NORM_EPSILON = 1e-6  # added to the variance of a layer's outputs; flax's value
OBSERVATION_EPSILON = 1e-5  # added to the variance of an observation


class Layer:
    """`forward` maps `[B, D]` to `[B, D']` and keeps what the `backward` after it needs.

    `backward` takes the gradient by the output, stores those by the parameters, and returns that by the input.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name

    def forward(self, params: Arrays, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def backward(self, params: Arrays, d: np.ndarray, gradients: Arrays) -> np.ndarray:
        raise NotImplementedError


class Dense(Layer):
    """x W + b."""

    def forward(self, params: Arrays, x: np.ndarray) -> np.ndarray:
        self.x = x
        return x @ params[f"{self.name}/kernel"] + params[f"{self.name}/bias"]

    def backward(self, params: Arrays, d: np.ndarray, gradients: Arrays) -> np.ndarray:
        gradients[f"{self.name}/kernel"] = self.x.T @ d
        gradients[f"{self.name}/bias"] = d.sum(axis=0)
        return d @ params[f"{self.name}/kernel"].T


class Relu(Layer):
    """max(x, 0)."""

    def forward(self, params: Arrays, x: np.ndarray) -> np.ndarray:
        self.x = x
        return np.maximum(x, 0)

    def backward(self, params: Arrays, d: np.ndarray, gradients: Arrays) -> np.ndarray:
        return d * (self.x > 0)


class Tanh(Layer):
    """tanh x."""

    def forward(self, params: Arrays, x: np.ndarray) -> np.ndarray:
        self.y = np.tanh(x)
        return self.y

    def backward(self, params: Arrays, d: np.ndarray, gradients: Arrays) -> np.ndarray:
        return d * (1 - self.y**2)


class LayerNorm(Layer):
    """Each row with mean 0 and variance 1, then a scale and a bias of each column."""

    def forward(self, params: Arrays, x: np.ndarray) -> np.ndarray:
        self.deviation = np.sqrt(x.var(axis=1, keepdims=True) + LAYER_NORM_EPSILON)
        self.z = (x - x.mean(axis=1, keepdims=True)) / self.deviation
        return self.z * params[f"{self.name}/scale"] + params[f"{self.name}/bias"]

    def backward(self, params: Arrays, d: np.ndarray, gradients: Arrays) -> np.ndarray:
        gradients[f"{self.name}/scale"] = (d * self.z).sum(axis=0)
        gradients[f"{self.name}/bias"] = d.sum(axis=0)
        d_z = d * params[f"{self.name}/scale"]
        through_mean = d_z.mean(axis=1, keepdims=True)
        through_deviation = self.z * (d_z * self.z).mean(axis=1, keepdims=True)
        return (d_z - through_mean - through_deviation) / self.deviation


class Residual(Layer):
    """x + f(x), where f is several layers in turn."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers

    def forward(self, params: Arrays, x: np.ndarray) -> np.ndarray:
        y = x
        for layer in self.layers:
            y = layer.forward(params, y)
        return x + y

    def backward(self, params: Arrays, d: np.ndarray, gradients: Arrays) -> np.ndarray:
        d_y = d
        for layer in reversed(self.layers):
            d_y = layer.backward(params, d_y, gradients)
        return d + d_y


class Join(Layer):
    """x and the action, side by side; `Network` sets `action`, and reads the gradient by it."""

    action: np.ndarray
    d_action: np.ndarray

    def forward(self, params: Arrays, x: np.ndarray) -> np.ndarray:
        self.width = x.shape[1]
        return np.concatenate([x, self.action], axis=1)

    def backward(self, params: Arrays, d: np.ndarray, gradients: Arrays) -> np.ndarray:
        self.d_action = d[:, self.width :]
        return d[:, : self.width]


class Network:
    """A policy, or a critic if it is given actions."""

    def __init__(self, units: Sequence[int], has_blocks: bool, is_critic: bool) -> None:
        self.join = Join()
        if has_blocks:
            blocks = [
                Residual(
                    LayerNorm(f"torso/LayerNorm_{i - 1}"),
                    Dense(f"torso/Dense_{2 * i - 1}"),
                    Relu(),
                    Dense(f"torso/Dense_{2 * i}"),
                )
                for i in range(1, len(units))
            ]
            layers = [Dense("torso/Dense_0"), *blocks, LayerNorm(f"torso/LayerNorm_{len(units) - 1}")]
        else:
            layers = [layer for i in range(len(units)) for layer in (Dense(f"torso/Dense_{i}"), Relu())]
        if is_critic:
            layers.insert(0 if has_blocks or len(units) == 1 else 2, self.join)
        self.layers = [*layers, Dense("value")] if is_critic else [*layers, Dense("action"), Tanh()]

    def forward(self, params: Arrays, x: np.ndarray, action: np.ndarray | None = None) -> np.ndarray:
        """Returns actions, `[B, A]`, or values, `[B, 1]`."""
        if action is not None:
            self.join.action = action
        for layer in self.layers:
            x = layer.forward(params, x)
        return x

    def backward(self, params: Arrays, d: np.ndarray) -> Arrays:
        """Returns the gradients by the parameters; `join.d_action` is that by the action."""
        gradients: Arrays = {}
        for layer in reversed(self.layers):
            d = layer.backward(params, d, gradients)
        return gradients


def joined(trees: Sequence[Arrays]) -> Arrays:
    """Returns the parameters of several networks as those of one, which is what an optimizer sees."""
    return {f"{number}/{name}": array for number, tree in enumerate(trees) for name, array in tree.items()}


def parted(tree: Arrays, count: int) -> list[Arrays]:
    """Undoes `joined`."""
    split = [(name.split("/", 1), array) for name, array in tree.items()]
    return [{name: array for (place, name), array in split if place == str(number)} for number in range(count)]


class Learner:
    """Ape-X DPG in NumPy; `config` has the keys of `apex_jax.config.Config`."""

    def __init__(self, policy: Arrays, critics: Sequence[Arrays], config: Any) -> None:
        network = config.network
        self.config, self.updates = config, 0
        self.policy, self.critics = policy, list(critics)
        self.target_policy, self.target_critics = policy, list(critics)
        self.policy_network = Network(network.policy_units, network.layer_norm, is_critic=False)
        self.critic_network = Network(network.critic_units, network.layer_norm, is_critic=True)
        self.policy_optimizer, self.critic_optimizer = self._optimizer(policy), self._optimizer(joined(critics))
        self.seen: list[np.ndarray] = []  # all observations so far

    def _optimizer(self, params: Arrays) -> Adam | RMSProp:
        learner = self.config.learner
        if learner.optimizer == "adam":
            return Adam(params, learner.learning_rate, learner.optimizer_epsilon)
        return RMSProp(params, learner.learning_rate, learner.rmsprop_decay, learner.optimizer_epsilon)

    def normalized(self, observation: np.ndarray) -> np.ndarray:
        """Returns the inputs of the networks."""
        if not self.seen:
            return observation
        everything = np.concatenate(self.seen)
        return (observation - everything.mean(axis=0)) / np.sqrt(everything.var(axis=0) + OBSERVATION_EPSILON)

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Returns pi(s), `[B, A]`."""
        return self.policy_network.forward(self.policy, self.normalized(observation))

    def values(self, observation: np.ndarray, action: np.ndarray) -> np.ndarray:
        """Returns q(s, a) of each critic, `[C, B]`."""
        x = self.normalized(observation)
        return np.array([self.critic_network.forward(critic, x, action)[:, 0] for critic in self.critics])

    def update(self, batch: Batch, learning_rate_share: float) -> tuple[np.ndarray, dict[str, float]]:
        """Makes an update; returns the new priorities and the metrics."""
        if self.config.network.normalize_observations:
            self.seen.append(batch.observation_t)
        x = self.normalized(batch.observation_t)
        critic_gradients, priorities, metrics = self._critic_gradients(batch, x)
        policy_gradients = self._policy_gradients(x, metrics)
        critics, norm = self._stepped(
            self.critic_optimizer, joined(self.critics), critic_gradients, learning_rate_share
        )
        self.policy, policy_norm = self._stepped(
            self.policy_optimizer, self.policy, policy_gradients, learning_rate_share
        )
        self.critics = parted(critics, len(self.critics))
        self.updates += 1
        if self.updates % self.config.learner.target_update_interval == 0:
            self.target_policy, self.target_critics = self.policy, self.critics
        return priorities, metrics | {"losses/gradient_norm": norm, "losses/policy_gradient_norm": policy_norm}

    def targets(self, batch: Batch) -> np.ndarray:
        """Returns the n-step return and the discounted smallest value of the bootstrap observation, `[B]`."""
        x = self.normalized(batch.observation_tpk)
        action = self.policy_network.forward(self.target_policy, x)
        smallest = np.full(len(x), np.inf)
        for critic in self.target_critics:
            smallest = np.minimum(smallest, self.critic_network.forward(critic, x, action)[:, 0])
        return batch.n_step_return + batch.discount * smallest

    def _critic_gradients(self, batch: Batch, x: np.ndarray) -> tuple[Arrays, np.ndarray, dict[str, float]]:
        targets, only = self.targets(batch), np.zeros(len(x), int)
        gradients, priorities, q_values, total = [], [], [], 0.0
        for critic in self.critics:
            q = self.critic_network.forward(critic, x, batch.action)
            loss, dq, priority = loss_and_gradient(q, only, targets, batch.weight, self.config.algorithm.loss)
            gradients.append(self.critic_network.backward(critic, dq))
            priorities.append(priority)
            q_values.append(float(q.mean()))
            total += loss
        return joined(gradients), priorities[0], {"losses/td_loss": total, "losses/q_values": q_values[0]}

    def action_gradients(self, x: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns q(s, a) of the first critic, `[B]`, and its derivative by the action, `[B, A]`."""
        q = self.critic_network.forward(self.critics[0], x, action)
        self.critic_network.backward(self.critics[0], np.ones_like(q))
        return q[:, 0], self.critic_network.join.d_action

    def _policy_gradients(self, x: np.ndarray, metrics: dict[str, float]) -> Arrays:
        action = self.policy_network.forward(self.policy, x)
        q, dq_da = self.action_gradients(x, action)
        metrics["losses/policy_loss"] = -float(q.mean())
        metrics["losses/action_saturation"] = float((np.abs(action) > 0.95).mean())
        if limit := self.config.algorithm.action_gradient_clip:
            dq_da = np.minimum(np.maximum(dq_da, -limit), limit)
        return self.policy_network.backward(self.policy, -dq_da / len(x))

    def _stepped(
        self, optimizer: Adam | RMSProp, params: Arrays, gradients: Arrays, share: float
    ) -> tuple[Arrays, float]:
        """Returns the parameters after this share of a step, and the norm of the gradients before clipping."""
        gradients, norm = clip_by_global_norm(gradients, self.config.learner.max_gradient_norm)
        stepped = optimizer.step(params, gradients)
        return {name: (1 - share) * old + share * stepped[name] for name, old in params.items()}, norm
