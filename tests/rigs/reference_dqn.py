"""Slow twin of the learner of Ape-X DQN, with the options that the paper does not have.

Like `reference`, it takes nothing from `apex_jax`: `config` only has the keys of `apex_jax.config.Config`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tests.rigs import reference
from tests.rigs.reference import Arrays, DuelingNetwork, RMSProp

EPSILON = 0.01  # of Pohlen et al. 2018
TAU, ALPHA, LEAST_LOG = 0.03, 0.9, -1.0  # of Vieillard et al. 2020, section 4


class Batch(NamedTuple):
    """Transitions and their importance weights; observations are vectors `[B, D]`."""

    observation_t: np.ndarray
    observation_tpk: np.ndarray
    action: np.ndarray
    n_step_return: np.ndarray
    discount: np.ndarray
    weight: np.ndarray


def h(x: float) -> float:
    """Returns a return as the network learns it."""
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + EPSILON * x


def inverse_h(x: float) -> float:
    """Returns the x of h(x), by the formula of proposition A.2 of Pohlen et al. 2018."""
    root = math.sqrt(1 + 4 * EPSILON * (abs(x) + 1 + EPSILON))
    return math.copysign(((root - 1) / (2 * EPSILON)) ** 2 - 1, x)


def log_policy(q: np.ndarray) -> np.ndarray:
    """Returns ln pi of the softmax policy of the q-values `[A]` of one observation."""
    likelihoods = [math.exp(value / TAU) for value in q]
    return np.array([value / TAU - math.log(sum(likelihoods)) for value in q])


def munchausen_bonus(q: np.ndarray, action: int) -> float:
    """Returns what is added to the reward of this action."""
    return ALPHA * max(TAU * float(log_policy(q)[action]), LEAST_LOG)


def soft_value(q: np.ndarray) -> float:
    """Returns the mean over the policy of q-value and entropy, of one observation."""
    return sum(math.exp(log) * (value - TAU * log) for log, value in zip(log_policy(q), q, strict=True))


class Learner:
    """Ape-X DQN in NumPy."""

    def __init__(self, online: Arrays, target: Arrays, config: Any) -> None:
        learner = config.learner
        self.config, self.updates = config, 0
        self.online, self.target = online, target
        self.network = DuelingNetwork()
        constants = (learner.learning_rate, learner.rmsprop_decay, learner.optimizer_epsilon)
        self.optimizer = RMSProp(self.online, *constants)

    def update(self, batch: Batch, learning_rate_share: float) -> tuple[np.ndarray, float, float, float]:
        """Returns priorities, loss, mean q-value and gradient norm of one update."""
        rows, form = np.arange(len(batch.action)), self.config.algorithm.loss
        targets = self.targets(batch)
        q, kept = self.network.forward(self.online, batch.observation_t)
        loss, dq, priorities = reference.loss_and_gradient(q, batch.action, targets, batch.weight, form)
        gradients = self.network.backward(self.online, kept, dq)
        gradients, norm = reference.clip_by_global_norm(gradients, self.config.learner.max_gradient_norm)
        stepped = self.optimizer.step(self.online, gradients)
        self.online = {
            name: (1 - learning_rate_share) * old + learning_rate_share * stepped[name]
            for name, old in self.online.items()
        }
        self.updates += 1
        if self.updates % self.config.learner.target_update_interval == 0:
            self.target = self.online
        return priorities, loss, q[rows, batch.action].mean(), norm

    def targets(self, batch: Batch) -> np.ndarray:
        """Returns the target of each transition, `[B]`."""
        algorithm, found = self.config.algorithm, []
        online_tpk, target_tpk = (
            self.network.forward(params, batch.observation_tpk)[0] for params in (self.online, self.target)
        )
        target_t, _ = self.network.forward(self.target, batch.observation_t)
        for i, action in enumerate(batch.action):
            if algorithm.munchausen:
                bonus, value = munchausen_bonus(target_t[i], action), soft_value(target_tpk[i])
            else:
                best = int(np.argmax(online_tpk[i] if algorithm.double_q else target_tpk[i]))
                bonus, value = 0.0, target_tpk[i, best]
            if algorithm.value_rescaling:
                target = h(batch.n_step_return[i] + batch.discount[i] * inverse_h(value))
            else:
                target = batch.n_step_return[i] + batch.discount[i] * value
            found.append(bonus + target)
        return np.array(found)
