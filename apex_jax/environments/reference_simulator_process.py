"""The child process of `ReferenceSimulator`: plays one episode over a connection.

It sends the size of actions and the frames per second of the video, then a step for the first observation and one for
the result of each action that it receives; an error is sent as a text. DM control and Gymnasium's simulators are
imported only here, and only for the tasks that need them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from apex_jax.host.errors import first_line
from apex_jax.host.program import CHECKOUT

FRAME_PIXELS = 480  # height and width of DM control's frames, and of Gymnasium's MuJoCo tasks by default
FRAMES_PER_SECOND_LIMIT = 30  # of the video: rendering a frame on the CPU takes longer than many steps
UNBOUNDED = 1e6  # a wider bound counts as none: MuJoCo uses 1e10

Step = tuple[np.ndarray, float, bool]  # observation float32[D], reward, whether the episode ended


class Simulator(Protocol):
    """The original environment of a task."""

    low: np.ndarray  # float64[A]
    high: np.ndarray  # float64[A]
    steps_per_second: float  # of simulated time

    def reset(self) -> np.ndarray:
        """Starts the episode and returns its first observation, float32[D]."""

    def step(self, action: np.ndarray) -> Step:
        """Applies an action, float64[A] between the bounds."""

    def render(self) -> np.ndarray:
        """Renders the present state: uint8[height, width, 3]."""


class DMControl:
    """A task of DM control's suite, under EnvPool's name."""

    def __init__(self, task: str, seed: int):
        """Raises LookupError if `task` is not EnvPool's name of a task of the suite."""
        from dm_control import suite

        names = {envpool_name(*names): names for names in suite.ALL_TASKS}
        if task not in names:
            raise LookupError("neither Gymnasium nor DM control has this task")
        self._velocity_before_target = names[task] == ("fish", "swim")  # in EnvPool's order of the parts
        self.environment = suite.load(*names[task], task_kwargs={"random": seed})
        bounds = self.environment.action_spec()
        self.low, self.high = bounds.minimum, bounds.maximum
        self.steps_per_second = 1 / self.environment.control_timestep()

    def reset(self) -> np.ndarray:
        """See `Simulator`."""
        return self._flat(self.environment.reset().observation)

    def step(self, action: np.ndarray) -> Step:
        """See `Simulator`."""
        time_step = self.environment.step(action)
        return self._flat(time_step.observation), time_step.reward, time_step.last()

    def render(self) -> np.ndarray:
        """See `Simulator`."""
        return self.environment.physics.render(height=FRAME_PIXELS, width=FRAME_PIXELS, camera_id=0)

    def _flat(self, parts: dict[str, Any]) -> np.ndarray:
        if self._velocity_before_target:
            parts["target"] = parts.pop("target")  # becomes the last one
        return np.concatenate([np.ravel(part) for part in parts.values()]).astype(np.float32)


class Gymnasium:
    """A task of Gymnasium with continuous actions, such as HalfCheetah-v4 and Pendulum-v1."""

    def __init__(self, task: str, seed: int):
        """Raises Gymnasium's own errors for a task that it cannot make, and TypeError for discrete actions."""
        import gymnasium

        self._seed = seed
        self.environment = gymnasium.make(task, render_mode="rgb_array", disable_env_checker=True)
        space = self.environment.action_space
        if not isinstance(space, gymnasium.spaces.Box):
            raise TypeError("its actions are not continuous")
        self.low, self.high = space.low.astype(np.float64), space.high.astype(np.float64)
        self._action_dtype = space.dtype
        self.steps_per_second = float(self.environment.metadata["render_fps"])

    def reset(self) -> np.ndarray:
        """See `Simulator`."""
        return self._flat(self.environment.reset(seed=self._seed)[0])

    def step(self, action: np.ndarray) -> Step:
        """See `Simulator`."""
        observation, reward, terminated, truncated, _ = self.environment.step(action.astype(self._action_dtype))
        return self._flat(observation), float(reward), bool(terminated or truncated)

    def render(self) -> np.ndarray:
        """See `Simulator`."""
        return np.asarray(self.environment.render())

    def _flat(self, observation: Any) -> np.ndarray:
        return np.ravel(observation).astype(np.float32)


def envpool_name(domain: str, task: str) -> str:
    """Returns EnvPool's name of a task of DM control: WalkerWalk-v1 for ("walker", "walk")."""
    words = f"{domain}_{task}".split("_")
    return "".join(word[0].upper() + word[1:] for word in words) + "-v1"


def make_simulator(task: str, seed: int) -> Simulator:
    """Returns the environment of a task under EnvPool's name."""
    import gymnasium

    return (Gymnasium if task in gymnasium.registry else DMControl)(task, seed)


def scaled(action: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Scales an action from [-1, 1] to the bounds, all of them float64[A]; a missing bound counts as -1 or 1."""
    low, high = np.where(low < -UNBOUNDED, -1.0, low), np.where(high > UNBOUNDED, 1.0, high)
    return np.clip((low + high) / 2 + action * (high - low) / 2, low, high)


def play(connection: Connection, task: str, seed: int) -> None:
    """Plays an episode of a task; the whole work of this process."""
    os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a display, on the CPU if there is no GPU
    os.dup2(2, 1)  # simulators print greetings and warnings
    os.chdir(tempfile.gettempdir())  # MuJoCo writes a log to the working directory
    with contextlib.suppress(EOFError, OSError):  # the parent has closed the connection
        try:
            play_episode(make_simulator(task, seed % 2**32), connection)
        except (EOFError, OSError):
            raise
        except Exception as error:
            connection.send(explained(error))


def play_episode(simulator: Simulator, connection: Connection) -> None:
    """Plays the episode until it ends. Raises EOFError if the connection is closed before."""
    steps_per_frame = math.ceil(simulator.steps_per_second / FRAMES_PER_SECOND_LIMIT)
    observation, reward, ended = simulator.reset(), 0.0, False
    connection.send((len(simulator.low), simulator.steps_per_second / steps_per_frame))
    for step in itertools.count():
        frame = simulator.render() if ended or step % steps_per_frame == 0 else None
        connection.send((observation, float(reward), bool(ended), frame))
        if ended:
            return
        action = connection.recv()
        observation, reward, ended = simulator.step(scaled(action.astype(np.float64), simulator.low, simulator.high))


def explained(error: Exception) -> str:
    """Returns an error on one line, with the commands that install what is missing."""
    missing = next((e.name for e in (error, error.__cause__) if isinstance(e, ModuleNotFoundError)), None)
    if missing == "dm_control" and sys.version_info >= (3, 13):
        return "dm_control cannot be installed on Python 3.13 (its labmaze has no release for it); use Python 3.12"
    if missing is None and "EGL" not in str(error) and "eglQuery" not in str(error):
        return first_line(error)
    what = f"{missing} is not installed" if missing else "there is no EGL library to render with"
    packages = "-r requirements-film.txt" if CHECKOUT else "'apex-jax[film]'"
    return f"{what}; run pip install {packages} and apt install libegl1 libgl1"
