"""Environments of Gymnasium behind the interface of EnvPool's pools: `send`, `recv`, `async_reset`, `render`, `close`.

Groups of them are acted on at once, so that one group steps while the actor computes the actions of another. They reset
on the step after an episode's end, as EnvPool does.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, TypeAlias

import numpy as np

from apex_jax.config import EnvironmentConfig
from apex_jax.environments.gymnasium_processes import CLOSE_SECONDS, START_SECONDS, end_groups, fork_server, leader
from apex_jax.environments.gymnasium_tasks import Adapted, BrokenEnvironment, make
from apex_jax.host.errors import RunError, UsageError

ANSWER_SECONDS = 50.0  # of a step or reset; the supervisor kills an actor that makes no progress for 60

Result: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]


class GymnasiumPool:
    """Environments in groups; `recv` returns the groups in the order in which they were sent.

    With `environment.own_processes`, each environment runs in a process of its own. Its methods raise BrokenEnvironment
    if an environment fails, ends its process, or does not answer in time.
    """

    def __init__(
        self, environment: EnvironmentConfig, seeds: np.ndarray, max_steps: int, per_step: int, rendered: bool
    ):
        """`seeds`: int[E]; `max_steps`: of an episode; `per_step`: environments of a group.

        `rendered`: environment 0 can be rendered.
        """
        self._frame_stack = environment.frame_stack
        self._groups = np.array_split(np.arange(len(seeds), dtype=np.int32), -(-len(seeds) // per_step))
        self._sent: deque[np.ndarray] = deque()
        self._begins = np.ones(len(seeds), bool)  # whether the next observation is the first of an episode
        self._stacks: np.ndarray | None = None  # uint8[E, F, *O] of pixels, see `_stacked`
        self._environments: list[_InThisProcess | _InOwnProcess] = []
        # Called before `multiprocessing` waits for processes at the end of this one.
        self._end = Finalize(self, _end, (self._environments,), exitpriority=1)
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            for i, seed in enumerate(map(int, seeds)):
                task, settings, layout = environment.task, environment.settings, environment.observation_layout
                function = functools.partial(make, task, settings, max_steps, rendered and i == 0, seed, layout)
                kind = _InOwnProcess if environment.own_processes else _InThisProcess
                self._environments.append(kind(environment.task, function, seed))
            self._results(range(len(seeds)), START_SECONDS)  # that they are made
            failed.pop_all()

    def async_reset(self) -> None:
        """Starts a new episode in every environment."""
        self._begins[:] = True
        for environment in self._environments:
            environment.start("reset")
        self._sent = deque(self._groups)

    def send(self, actions: np.ndarray, env_id: np.ndarray) -> None:
        """Starts the next step of whole groups; `actions` [A, ...] for the environments `env_id`, int[A]."""
        for i, action in zip(env_id, actions, strict=True):
            self._environments[i].start("step", action)
        self._sent.extend(group for group in self._groups if group[0] in env_id)

    def recv(self) -> Result:
        """Waits for the group that was sent first: observations [A, ...], rewards, terminated, truncated, infos.

        Pixels are the newest frames of an episode, uint8[A, F, *O]; the first frame of an episode fills its stack.
        """
        group = self._sent.popleft()
        seconds = START_SECONDS if self._begins[group].all() else ANSWER_SECONDS
        observations, rewards, terminated, truncated, infos = zip(*self._results(group, seconds), strict=True)
        observation, ended = np.stack(observations), np.array(terminated) | np.array(truncated)
        info = {"env_id": group}
        if "lives" in infos[0]:
            info["lives"] = np.array([each.get("lives", 0) for each in infos], np.int32)
        if observation.dtype == np.uint8:
            observation = self._stacked(observation, group)
        self._begins[group] = ended
        return observation, np.array(rewards, np.float64), np.array(terminated), np.array(truncated), info

    def render(self) -> tuple[np.ndarray | None]:
        """Returns the frame of environment 0, uint8[height, width, 3]."""
        self._environments[0].start("render")
        return (self._environments[0].result(ANSWER_SECONDS),)

    def close(self) -> None:
        """Ends the environments and their processes."""
        self._end()

    def _results(self, group: Any, seconds: float) -> list[Any]:
        until = time.monotonic() + seconds
        return [self._environments[i].result(max(0.0, until - time.monotonic())) for i in group]

    def _stacked(self, frames: np.ndarray, group: np.ndarray) -> np.ndarray:
        if self._stacks is None:
            shape = len(self._environments), self._frame_stack, *frames.shape[1:]
            self._stacks = np.zeros(shape, np.uint8)
        begins, stack = self._begins[group], self._stacks[group]  # copies
        stack[:, :-1] = stack[:, 1:]
        stack[:, -1] = frames
        stack[begins] = frames[begins][:, None]
        self._stacks[group] = stack
        return stack


class _Player:
    """Plays an environment; the step after an episode's end resets it."""

    def __init__(self, environment: Adapted, seed: int):
        self._environment = environment
        self._seed: int | None = seed  # of the first reset
        self._ended = False

    def reset(self) -> tuple[np.ndarray, float, bool, bool, dict[str, int]]:
        observation, info = self._environment.reset(seed=self._seed)
        self._seed, self._ended = None, False
        return observation, 0.0, False, False, info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, int]]:
        if self._ended:
            return self.reset()
        result = self._environment.step(action)
        self._ended = result[2] or result[3]
        return result

    def render(self) -> np.ndarray | None:
        return self._environment.render()


class _InThisProcess:
    """An environment that acts when its result is asked for."""

    def __init__(self, task: str, function: Callable[[], Adapted], seed: int):
        self.environment = function()
        self._player = _Player(self.environment, seed)
        self._call: Callable[[], Any] = lambda: None

    def start(self, method: str, *arguments: Any) -> None:
        self._call = functools.partial(getattr(self._player, method), *arguments)

    def result(self, seconds: float) -> Any:
        return self._call()


class _InOwnProcess:
    """An environment in a process of its own."""

    def __init__(self, task: str, function: Callable[[], Adapted], seed: int):
        self._task = task
        context = fork_server()
        self.connection, other_end = context.Pipe()
        self.process = context.Process(target=leader(_serve, function, seed, other_end), daemon=False)
        self.process.start()
        other_end.close()

    def start(self, method: str, *arguments: Any) -> None:
        with contextlib.suppress(OSError):  # `result` raises an error with the exit code
            self.connection.send((method, arguments))

    def result(self, seconds: float) -> Any:
        """Waits for the result; also notices the end of a process whose children hold its connection."""
        what = f"environment.task={self._task}: the process of an environment"
        if not wait([self.connection, self.process.sentinel], seconds):
            raise BrokenEnvironment(f"{what} has not answered in time; it hangs, or a step of it is too slow")
        try:
            if not self.connection.poll():
                raise EOFError
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(1.0)
            raise BrokenEnvironment(f"{what} ended with exit code {self.process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _end(environments: list[_InThisProcess | _InOwnProcess]) -> None:
    """Closes environments; waits up to CLOSE_SECONDS for their processes, and kills what remains of them."""
    in_own = [environment for environment in environments if isinstance(environment, _InOwnProcess)]
    for each in in_own:
        each.start("close")
    end_groups([each.process for each in in_own], CLOSE_SECONDS)
    for environment in environments:
        with contextlib.suppress(Exception):  # of an environment's own `close`
            (environment.connection if isinstance(environment, _InOwnProcess) else environment.environment).close()


def _serve(function: Callable[[], Adapted], seed: int, connection: Connection) -> None:
    """Makes an environment, and calls the methods that `_InOwnProcess` asks for, until "close" or an error."""
    try:
        environment = function()
        with contextlib.closing(environment):
            player = _Player(environment, seed)
            connection.send(None)
            while (call := connection.recv())[0] != "close":
                connection.send(getattr(player, call[0])(*call[1]))
    except (RunError, UsageError) as error:
        connection.send(error)
    except (EOFError, OSError):  # the parent has ended
        pass
