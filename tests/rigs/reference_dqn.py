"""Slow twin of the learner of Ape-X DQN, with the options that the paper does not have.

Like `reference`, it takes nothing from `apex_jax`: `config` only has the keys of `apex_jax.config.Config`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.rigs import reference
from tests.rigs.reference import Arrays, Batch, DuelingNetwork, RMSProp

TAU, ALPHA, LEAST_LOG = 0.03, 0.9, -1.0  # of Vieillard et al. 2020, section 4


def log_policy(q: np.ndarray) -> np.ndarray:
    """Returns ln pi of the softmax policy of the q-values `[A]` of one observation."""
    likelihoods = [math.exp(value / TAU) for value in q]
    return np.array([value / TAU - math.log(sum(likelihoods)) for value in q])


def munchausen_bonus(q: np.ndarray, action: int) -> float:
    """Returns what is added to the reward of this action."""
    return ALPHA * max(TAU * float(log_policy(q)[action]), LEAST_LOG)


def soft_value(q: np.ndarray, values: np.ndarray) -> float:
    """Returns the mean of value and entropy over the policy of the q-values `[A]`; `values`: they, or a quantile."""
    return sum(math.exp(log) * (value - TAU * log) for log, value in zip(log_policy(q), values, strict=True))


def quantile_loss_and_gradient(
    z: np.ndarray, action: np.ndarray, target: np.ndarray, weight: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Returns the batch mean of the weighted loss, its gradient by `z` `[B, A, N]`, and the new priorities `[B]`."""
    size, _, count = z.shape
    loss, gradient, priority = 0.0, np.zeros(z.shape), np.zeros(size)
    for b in range(size):
        for i in range(count):
            for j in range(count):
                error = target[b, j] - z[b, action[b], i]
                share = abs((2 * i + 1) / (2 * count) - (1 if error < 0 else 0)) * weight[b] / count / size
                loss += share * (0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5)
                gradient[b, action[b], i] -= share * max(-1.0, min(1.0, error))
        priority[b] = abs(target[b].mean() - z[b, action[b]].mean())
    return loss, gradient, priority


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the probabilities of the atoms `[..., N]`."""
    likelihoods = np.exp(logits)
    return likelihoods / likelihoods.sum(axis=-1, keepdims=True)


def atom_loss_and_gradient(
    logits: np.ndarray, action: np.ndarray, target: np.ndarray, weight: np.ndarray, returns: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Returns the same as `quantile_loss_and_gradient`, from the probabilities `target` `[B, N]` of `returns` `[N]`."""
    loss, gradient, priority = 0.0, np.zeros(logits.shape), np.zeros(len(logits))
    for b, share in enumerate(weight / len(logits)):
        p = softmax(logits[b, action[b]])
        loss -= share * float(target[b] @ np.log(p))
        gradient[b, action[b]] = share * (p - target[b])
        priority[b] = abs((target[b] - p) @ returns)
    return loss, gradient, priority


class QuantileNetwork:
    """A dueling network for each of N quantiles or atoms, with shared hidden layers: outputs a N to a N + N - 1 of a.

    With N = 1 it is the dueling network.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def _columns(self, params: Arrays, j: int) -> Arrays:
        of_j = {name: array[..., j :: self.count] for name, array in params.items() if "hidden" not in name}
        return params | of_j

    def forward(self, params: Arrays, x: np.ndarray) -> np.ndarray:
        """Returns the quantiles `[B, A, N]` of `x` `[B, D]`."""
        self.kept = [DuelingNetwork().forward(self._columns(params, j), x) for j in range(self.count)]
        return np.stack([q for q, _ in self.kept], axis=2)

    def backward(self, params: Arrays, dz: np.ndarray) -> Arrays:
        """Returns the gradient by every parameter, given that by the quantiles of the last `forward`."""
        total = {name: np.zeros(array.shape) for name, array in params.items()}
        for j in range(self.count):
            gradients = DuelingNetwork().backward(self._columns(params, j), self.kept[j][1], dz[:, :, j])
            for name, gradient in gradients.items():
                (total[name] if "hidden" in name else total[name][..., j :: self.count])[...] += gradient
        return total


class Learner:
    """Ape-X DQN in NumPy."""

    def __init__(self, online: Arrays, target: Arrays, config: Any) -> None:
        learner = config.learner
        self.config, self.updates = config, 0
        self.online, self.target = online, target
        algorithm = config.algorithm
        self.network = QuantileNetwork(max(1, algorithm.quantiles, algorithm.atoms))
        self.returns = np.linspace(algorithm.lowest_return, algorithm.highest_return, max(1, algorithm.atoms))
        constants = (learner.learning_rate, learner.rmsprop_decay, learner.optimizer_epsilon)
        self.optimizer = RMSProp(self.online, *constants)

    def update(self, batch: Batch, learning_rate_share: float) -> tuple[np.ndarray, float, float, float]:
        """Returns priorities, loss, mean q-value and gradient norm of one update."""
        rows, form = np.arange(len(batch.action)), self.config.algorithm.loss
        targets, z = self.targets(batch), self.network.forward(self.online, batch.observation_t)
        if self.config.algorithm.atoms:
            loss, dz, priorities = atom_loss_and_gradient(z, batch.action, targets, batch.weight, self.returns)
            z = softmax(z) @ self.returns[:, None]  # whose mean over the actions taken is the q-value
        elif self.config.algorithm.quantiles:
            loss, dz, priorities = quantile_loss_and_gradient(z, batch.action, targets, batch.weight)
        else:
            q, target = z[:, :, 0], targets[:, 0]
            loss, dq, priorities = reference.loss_and_gradient(q, batch.action, target, batch.weight, form)
            dz = dq[:, :, None]
        gradients = self.network.backward(self.online, dz)
        gradients, norm = reference.clip_by_global_norm(gradients, self.config.learner.max_gradient_norm)
        stepped = self.optimizer.step(self.online, gradients)
        self.online = {
            name: (1 - learning_rate_share) * old + learning_rate_share * stepped[name]
            for name, old in self.online.items()
        }
        self.updates += 1
        if self.updates % self.config.learner.target_update_interval == 0:
            self.target = self.online
        return priorities, loss, z[rows, batch.action].mean(), norm

    def targets(self, batch: Batch) -> np.ndarray:
        """Returns the targets of each transition, `[B, N]`."""
        algorithm = self.config.algorithm
        z_online_tpk, z_tpk = (
            self.network.forward(params, batch.observation_tpk) for params in (self.online, self.target)
        )
        if algorithm.atoms:
            return self.projected(batch, softmax(z_tpk), softmax(z_online_tpk if algorithm.double_q else z_tpk))
        q_t, found = self.network.forward(self.target, batch.observation_t).mean(axis=2), np.zeros((len(z_tpk), 0))
        for j in range(z_tpk.shape[2]):
            of_j = []
            for i, action in enumerate(batch.action):
                q = z_tpk[i].mean(axis=1)
                if algorithm.munchausen:
                    bonus, value = munchausen_bonus(q_t[i], action), soft_value(q, z_tpk[i, :, j])
                else:
                    bonus = 0.0
                    value = z_tpk[i, np.argmax(z_online_tpk[i].mean(axis=1) if algorithm.double_q else q), j]
                of_j.append(bonus + batch.n_step_return[i] + batch.discount[i] * value)
            found = np.column_stack([found, of_j])
        return found

    def projected(self, batch: Batch, p_tpk: np.ndarray, p_choosing: np.ndarray) -> np.ndarray:
        """Returns the target probabilities of each transition, `[B, N]`."""
        found, returns, spacing = np.zeros(p_tpk[:, 0].shape), self.returns, self.returns[1] - self.returns[0]
        for i, of_i in enumerate(p_tpk[range(len(p_tpk)), np.argmax(p_choosing @ returns, axis=1)]):
            for probability, value in zip(of_i, returns, strict=True):
                place = np.clip(batch.n_step_return[i] + batch.discount[i] * value, returns[0], returns[-1])
                below = min(int((place - returns[0]) / spacing), len(returns) - 2)
                share = (place - returns[below]) / spacing
                found[i, below : below + 2] += probability * (1 - share), probability * share
        return found
