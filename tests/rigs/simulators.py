"""Processes that stand for the simulator of `ReferenceSimulator`; each takes a connection, a task and a seed."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from apex_jax.environments.reference_simulator_process import Step, play_episode


class Counter:
    """A simulator whose observation is the last action, and whose frame shows the number of steps."""

    low, high = np.array([-2.0, 0.0]), np.array([2.0, 1.0])

    def __init__(self, steps: int, steps_per_second: float):
        self.steps_per_second = steps_per_second
        self._steps, self._count = steps, 0

    def reset(self) -> np.ndarray:
        return np.zeros(2, np.float32)

    def step(self, action: np.ndarray) -> Step:
        self._count += 1
        return action.astype(np.float32), self._count / 3, self._count == self._steps

    def render(self) -> np.ndarray:
        return np.full((2, 4, 3), self._count, np.uint8)


def slow(connection: Connection, *_: Any) -> None:
    play_episode(Counter(steps=3, steps_per_second=20), connection)


def fast(connection: Connection, *_: Any) -> None:
    play_episode(Counter(steps=6, steps_per_second=100), connection)


def hangs_at_the_start(*_: Any) -> None:
    time.sleep(600)


def dies_at_the_start(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs_at_a_step(connection: Connection, *_: Any) -> None:
    _start(connection)
    time.sleep(600)


def dies_at_a_step(connection: Connection, *_: Any) -> None:
    _start(connection)
    connection.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def _start(connection: Connection) -> None:
    connection.send((2, 20.0))
    connection.send((np.zeros(2, np.float32), 0.0, False, None))
