"""Plays one episode of a continuous task in its original simulator, DM control or Gymnasium, and returns its frames.

Training uses EnvPool, but the video of a policy shows an episode of the original environment, whose score is an
independent check of observations and actions. The simulator and its renderer run in a process of their own,
`reference_simulator_process`, because a missing or broken graphics library can end or hang a process.
"""

from __future__ import annotations

import contextlib
from fractions import Fraction
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from apex_jax.environments.gymnasium_processes import end_groups, fork_server, leader
from apex_jax.environments.reference_simulator_process import play
from apex_jax.host.errors import RunError

START_SECONDS = 60.0  # to import the simulator and draw the first frame
STEP_SECONDS = 30.0
EXIT_SECONDS = 5.0


class SimulatorError(RunError):
    """The simulator cannot play or show the episode; the message is one line."""


class ReferenceSimulator:
    """One episode, in a process of its own. Raises SimulatorError if that process fails or does not answer in time."""

    observation: np.ndarray  # float32[D], the newest
    frame: np.ndarray | None  # uint8[height, width, 3] of the newest step; None if the step is not part of the video

    def __init__(self, task: str, seed: int):
        """Starts the simulator and the episode."""
        self._task = task
        with fork_server() as context:
            self._connection, other_end = context.Pipe()
            self._process = context.Process(target=leader(play, other_end, task, seed))
            self._process.start()
        other_end.close()
        try:
            self.action_size, rate = self._receive(START_SECONDS)
            self.frames_per_second = Fraction(rate).limit_denominator(1000)
            self._receive_step(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ReferenceSimulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """Applies an action, float32[A]; returns the observation, the reward, and whether the episode ended.

        Each element of the action is in [-1, 1]. No action is accepted after the end of the episode. DM control's LQR
        has no step limit.
        """
        with contextlib.suppress(BrokenPipeError):  # `_receive` raises an error with the exit code
            self._connection.send(np.asarray(action, np.float32))
        return self._receive_step(STEP_SECONDS)

    def close(self) -> None:
        """Ends the simulator's process."""
        end_groups([self._process], 0.0)
        self._connection.close()

    def _receive_step(self, seconds: float) -> tuple[np.ndarray, float, bool]:
        self.observation, reward, ended, self.frame = self._receive(seconds)
        return self.observation, reward, ended

    def _receive(self, seconds: float) -> Any:
        if not wait([self._connection, self._process.sentinel], seconds):
            raise self._error(f"its simulator has not answered within {seconds:g} s")
        try:
            message = self._connection.recv() if self._connection.poll() else ""
        except (EOFError, ConnectionResetError):
            message = ""
        if isinstance(message, str):  # an error
            self._process.join(EXIT_SECONDS)
            raise self._error(message or f"its simulator ended with exit code {self._process.exitcode}")
        return message

    def _error(self, reason: str) -> SimulatorError:
        return SimulatorError(f"{self._task} cannot be rendered: {reason}")
