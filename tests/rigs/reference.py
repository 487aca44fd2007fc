"""Slow twins: the definitions of this project's mathematics, one obvious line at a time, in Python and NumPy.

Nothing here is taken from `apex_jax`, so that a mistake there cannot be repeated here.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]


class Step(NamedTuple):
    """One result of one environment, and the action after it."""

    observation: Any  # the stack as the environment returned it, or its number in a big array of such stacks
    reward: float  # raw, of the action before this observation
    terminated: bool
    truncated: bool
    lives: int
    action: int | bytes  # chosen at this observation; ignored where the episode has just ended; bytes if continuous
    q_taken: float
    q_max: float


class Record(NamedTuple):
    """One n-step transition."""

    t: int  # number of its first step in the history
    observation: Any
    action: int | bytes
    n_step_return: float
    discount: float
    k: int
    bootstrap: Any  # the observation k steps later
    priority: float


class Batch(NamedTuple):
    """Transitions and their importance weights; observations are vectors `[B, D]`."""

    observation_t: np.ndarray
    observation_tpk: np.ndarray
    action: np.ndarray
    n_step_return: np.ndarray
    discount: np.ndarray
    weight: np.ndarray


def slow_transitions(
    history: list[Step], n: int, gamma: float, reward_clip: float, life_loss_terminates: bool
) -> list[Record]:
    """Returns one record for every action that the environment carried out and whose outcome is known completely.

    Everything is summed and multiplied from the earliest step to the latest, in Python's floats (float64).
    """
    records = []
    for t, start in enumerate(history):
        if start.terminated or start.truncated:
            continue  # its action is ignored: the next return is a reset
        n_step_return, discount = 0.0, 1.0
        for k, (before, now) in enumerate(itertools.pairwise(history[t : t + n + 1]), start=1):
            reward = min(max(now.reward, -reward_clip), reward_clip) if reward_clip else now.reward
            n_step_return += discount * reward
            dead = now.terminated or (life_loss_terminates and now.lives < before.lives)
            discount *= 0.0 if dead else gamma
            if dead or now.truncated or k == n:
                priority = abs(n_step_return + discount * now.q_max - start.q_taken)
                values = (t, start.observation, start.action, n_step_return, discount, k, now.observation, priority)
                records.append(Record(*values))
                break
    return records


def records_in_full_segments(
    history: list[Step], records: list[Record], frame_stack: int, n: int, slots: int, first_slot: int = 0
) -> list[Record]:
    """Returns the records whose segment is full at the end of the history.

    Frames are written from `first_slot` on. The first return of an episode takes `frame_stack` frame slots, every other
    one; each segment begins `slots - (frame_stack - 1 + n)` slots after the one before; its first `frame_stack - 1`
    slots start no transition.
    """
    slot_of, written, fresh = [], first_slot, True
    for step in history:
        written += frame_stack if fresh else 1
        slot_of.append(written - 1)
        fresh = step.terminated or step.truncated
    stride = slots - (frame_stack - 1 + n)
    full = max(0, (written - slots) // stride + 1)
    return [record for record in records if slot_of[record.t] < frame_stack - 1 + full * stride]


def epsilon_ladder(size: int, base: float, exponent: float) -> list[float]:
    """Returns epsilon of environments 0..size-1 of the fleet."""
    return [base ** (1 + (exponent * i / (size - 1) if size > 1 else 0)) for i in range(size)]


def noise_ladder(size: int, largest: float, smallest: float) -> list[float]:
    """Returns sigma of environments 0..size-1 of the fleet: evenly spaced logarithms from the largest down."""
    positions = [i / (size - 1) if size > 1 else 0.0 for i in range(size)]
    return [math.exp((1 - at) * math.log(largest) + at * math.log(smallest)) for at in positions]


def n_step_targets(
    n_step_return: np.ndarray, discount: np.ndarray, online_q: np.ndarray, target_q: np.ndarray, double_q: bool
) -> np.ndarray:
    """Returns `[B]` targets from the q-values `[B, A]` of the bootstrap observations."""
    targets = []
    for i in range(len(discount)):
        best = int(np.argmax(online_q[i] if double_q else target_q[i]))
        targets.append(n_step_return[i] + discount[i] * target_q[i, best])
    return np.array(targets)


def loss_and_gradient(
    q: np.ndarray, action: np.ndarray, target: np.ndarray, weight: np.ndarray, form: str
) -> tuple[float, np.ndarray, np.ndarray]:
    """Returns the batch mean of the weighted loss, its gradient by q `[B, A]`, and the new priorities `[B]`."""
    size = len(action)
    loss, gradient, priority = 0.0, np.zeros(q.shape), np.zeros(size)
    for i in range(size):
        error = target[i] - q[i, action[i]]
        if form == "squared":
            value, slope = 0.5 * error**2, error
        else:  # huber: quadratic up to 1, linear beyond
            value = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
            slope = max(-1.0, min(1.0, error))
        loss += weight[i] * value / size
        gradient[i, action[i]] = -weight[i] * slope / size
        priority[i] = abs(error)
    return loss, gradient, priority


def clip_by_global_norm(gradients: Arrays, max_norm: float) -> tuple[Arrays, float]:
    """Returns the gradients scaled to at most this norm of all together (0 = never), and the norm they had."""
    norm = math.sqrt(sum(float(np.sum(g**2)) for g in gradients.values()))
    scale = max_norm / norm if 0 < max_norm < norm else 1.0
    return {name: g * scale for name, g in gradients.items()}, norm


class RMSProp:
    """Centered RMSProp, epsilon inside the root: theta <- theta - lr g / sqrt(m2 - m1^2 + epsilon)."""

    def __init__(self, params: Arrays, learning_rate: float, decay: float, epsilon: float) -> None:
        self.learning_rate, self.decay, self.epsilon = learning_rate, decay, epsilon
        self.first = {name: np.zeros(p.shape) for name, p in params.items()}
        self.second = {name: np.zeros(p.shape) for name, p in params.items()}

    def step(self, params: Arrays, gradients: Arrays) -> Arrays:
        """Returns the parameters one step further."""
        new = {}
        for name, g in gradients.items():
            self.first[name] = self.decay * self.first[name] + (1 - self.decay) * g
            self.second[name] = self.decay * self.second[name] + (1 - self.decay) * g**2
            variance = self.second[name] - self.first[name] ** 2
            new[name] = params[name] - self.learning_rate * g / np.sqrt(variance + self.epsilon)
        return new


class Adam:
    """Adam with both moments' bias corrected, epsilon beside the root."""

    def __init__(self, params: Arrays, learning_rate: float, epsilon: float) -> None:
        self.learning_rate, self.epsilon, self.steps = learning_rate, epsilon, 0
        self.first = {name: np.zeros(p.shape) for name, p in params.items()}
        self.second = {name: np.zeros(p.shape) for name, p in params.items()}

    def step(self, params: Arrays, gradients: Arrays) -> Arrays:
        """Returns the parameters one step further."""
        self.steps += 1
        new = {}
        for name, g in gradients.items():
            self.first[name] = 0.9 * self.first[name] + 0.1 * g
            self.second[name] = 0.999 * self.second[name] + 0.001 * g**2
            first = self.first[name] / (1 - 0.9**self.steps)
            second = self.second[name] / (1 - 0.999**self.steps)
            new[name] = params[name] - self.learning_rate * first / (np.sqrt(second) + self.epsilon)
        return new


class DuelingNetwork:
    """x -> value: dense, relu, dense to 1; advantage: dense, relu, dense to A; q = v + a - mean a; backward by hand."""

    def forward(self, params: Arrays, x: np.ndarray) -> tuple[np.ndarray, Arrays]:
        """Returns q `[B, A]` of `x` `[B, D]`, and what `backward` needs."""
        value_in = x @ params["value_hidden/kernel"] + params["value_hidden/bias"]
        advantage_in = x @ params["advantage_hidden/kernel"] + params["advantage_hidden/bias"]
        kept = {"x": x, "value": np.maximum(value_in, 0), "advantage": np.maximum(advantage_in, 0)}
        value = kept["value"] @ params["value/kernel"] + params["value/bias"]
        advantage = kept["advantage"] @ params["advantage/kernel"] + params["advantage/bias"]
        return value + advantage - advantage.mean(axis=1, keepdims=True), kept

    def backward(self, params: Arrays, kept: Arrays, dq: np.ndarray) -> Arrays:
        """Returns the gradient by every parameter, given that by q `[B, A]`."""
        outputs = {
            "value": dq.sum(axis=1, keepdims=True),
            "advantage": dq - dq.mean(axis=1, keepdims=True),  # every advantage lowers all q through the mean
        }
        gradients = {}
        for stream, d_output in outputs.items():
            hidden = kept[stream]
            gradients[f"{stream}/kernel"] = hidden.T @ d_output
            gradients[f"{stream}/bias"] = d_output.sum(axis=0)
            d_hidden = (d_output @ params[f"{stream}/kernel"].T) * (hidden > 0)
            gradients[f"{stream}_hidden/kernel"] = kept["x"].T @ d_hidden
            gradients[f"{stream}_hidden/bias"] = d_hidden.sum(axis=0)
        return gradients
