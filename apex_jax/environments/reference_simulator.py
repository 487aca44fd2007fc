"""Plays one episode of a continuous task in its original simulator, DM control or Gymnasium, and returns its screens.

Training uses EnvPool, but the film of a policy shows an episode of the original environment, whose score is an
independent check of observations and actions. The simulator and its renderer run in a process of their own,
`reference_simulator_process`, because a missing or broken graphics library can end or hang a process.

The child writes a header, then a record for the first observation and one for the result of each action. The header
is one line of JSON, padded with blanks to HEADER_BYTES, with the fields of `Header` or an "error". Both sides know the
size of everything that follows: actions are float32[A] in [-1, 1], and records have the layout of `record_type`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from apex_jax.host.errors import RunError, printable
from apex_jax.host.program import CHECKOUT

HEADER_BYTES = 4096
START_SECONDS = 60.0  # to import the simulator and draw the first screen
STEP_SECONDS = 30.0
EXIT_SECONDS = 5.0  # from the end of the child's output to its exit


class SimulatorError(RunError):
    """The simulator cannot play or show the episode; the message is one line."""


class Header(NamedTuple):
    """The child's description of its task."""

    observation_size: int
    action_size: int
    height: int
    width: int
    frames_per_second: float  # screens drawn per second of simulated time


def record_type(header: Header) -> np.dtype:
    """Returns the layout of a step's record."""
    return np.dtype([
        ("reward", "<f8"),
        ("ended", "?"),
        ("drawn", "?"),  # whether the screen shows this step; otherwise it shows an earlier one
        ("observation", "<f4", (header.observation_size,)),
        ("screen", "u1", (header.height, header.width, 3)),
    ])  # fmt: skip


class ReferenceSimulator:
    """One episode, in a process of its own. Raises SimulatorError if that process fails or does not answer in time."""

    observation: np.ndarray  # float32[D], the newest
    screen: np.ndarray | None  # uint8[height, width, 3] of the newest step; None if the step is not part of the film

    def __init__(self, task: str, seed: int, command: list[str] | None = None):
        """Starts the simulator and the episode; `command`: starts another child in its place, for tests."""
        self._task = task
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._child = subprocess.Popen(
            command or [*_python(), "-m", "apex_jax.environments.reference_simulator_process", task, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            cwd=CHECKOUT,  # on Python's path
            env={"MUJOCO_GL": "egl", **os.environ},  # EGL: renders without a display, on the CPU if there is no GPU
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._actions, self._answers = self._child.stdin, self._child.stdout
        try:
            fields = json.loads(self._read(HEADER_BYTES, START_SECONDS))
            if "error" in fields:
                raise self._error(fields["error"])
            header = Header(**fields)
            self.action_size = header.action_size
            self.frames_per_second = Fraction(header.frames_per_second).limit_denominator(1000)
            self._record_type = record_type(header)
            self._receive(START_SECONDS)
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
        if np.shape(action) != (self.action_size,):
            raise ValueError(f"{self._task} takes {self.action_size} numbers as its action, not {np.shape(action)}")
        with contextlib.suppress(BrokenPipeError):  # `_receive` raises an error with the child's last line
            self._actions.write(np.asarray(action, "<f4").tobytes())
        return self._receive(STEP_SECONDS)

    def close(self) -> None:
        """Ends the simulator's process."""
        self._child.kill()
        self._child.wait()
        for file in (self._actions, self._answers, self._errors):
            file.close()

    def _receive(self, seconds: float) -> tuple[np.ndarray, float, bool]:
        record = np.frombuffer(self._read(self._record_type.itemsize, seconds), self._record_type)[0]
        self.observation = record["observation"]
        self.screen = record["screen"] if record["drawn"] else None
        return self.observation, float(record["reward"]), bool(record["ended"])

    def _read(self, size: int, seconds: float) -> bytearray:
        """Returns the next `size` bytes that the child writes."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        data = bytearray()
        while len(data) < size:
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise self._error(f"its simulator has not answered within {seconds:g} s")
            if not (part := self._answers.read(size - len(data))):
                raise self._error(self._last_words())
            data += part
        return data

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(EXIT_SECONDS)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((f": {line.strip()[:200]}" for line in reversed(lines) if line.strip()), "")
        return f"its simulator ended with exit code {self._child.returncode}{last}"

    def _error(self, what: str) -> SimulatorError:
        return SimulatorError(f"{self._task} cannot be filmed: {printable(what)}")


def _python() -> list[str]:
    """Returns the command that starts Python; -P keeps the working directory off its path if there is no checkout."""
    return [sys.executable] if CHECKOUT is not None else [sys.executable, "-P"]
