"""Environments in processes of their own, of this interpreter or of `environment.python`, see `served`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from apex_jax.config import Config
from apex_jax.config.load import SETTINGS, config_of, yaml_text
from apex_jax.environments import served
from apex_jax.environments.served import CLOSE_SECONDS, packed, received
from apex_jax.environments.task import BrokenEnvironment
from apex_jax.host.errors import RunError, UsageError
from apex_jax.host.user_code import search_path
from apex_jax.run.environment_spec import as_record, of_record
from apex_jax.types import EnvironmentSpec

ANSWER_SECONDS = 50.0  # of a step or reset; the supervisor kills an actor that makes no progress for 60
START_SECONDS = 240.0  # until an environment is made, or has returned its first observation


class Interpreter:
    """A process that imports Gymnasium and the modules of a task, then forks one for each of several environments.

    So the code of a user runs neither in this process nor with its locks. However this one ends, so do those, with the
    processes that they have started, within two seconds.
    """

    def __init__(self, python: str, count: int, task: str = ""):
        """`python`: path or command; empty: the one that runs this. Raises UsageError if there is none.

        `task`: of the environments, gymnasium:..., whose modules are imported once; empty: none is.
        """
        program = shutil.which(os.path.expanduser(python or sys.executable))
        if program is None:
            raise UsageError(f"environment.python={python}: there is no such program; give a path, .venv/bin/python")
        pairs = [socket.socketpair() for _ in range(count)]
        self._ended, ended = os.pipe()
        self._has_ended = select.poll()
        self._has_ended.register(self._ended, select.POLLIN)
        pipes = [other.fileno() for _, other in pairs]
        settings = {"pipes": pipes, "ended": ended, "path": [] if python else search_path(), "task": task}
        options: Any = {"stdin": subprocess.DEVNULL, "pass_fds": [ended, *pipes], "start_new_session": True}
        self._process = subprocess.Popen([program, served.__file__, json.dumps(settings)], **options)
        os.close(ended)
        for _, other in pairs:
            other.close()
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()  # environments are made by several threads
        self.channels = [Channel(self, number, pipe) for number, (pipe, _) in enumerate(pairs)]

    def exit_code(self, number: int, seconds: float = 0.0) -> int | None:
        """Returns the exit code of a process, for which it waits; None if it runs."""
        until = time.monotonic() + seconds
        with self._lock:
            while number not in self._codes:
                if not self._has_ended.poll(max(0, round(1000 * (until - time.monotonic())))):
                    return None
                if not (row := os.read(self._ended, 8)):  # the interpreter has ended first
                    return self._process.wait()
                ended, code = struct.unpack("!ii", row)
                self._codes[ended] = code
            return self._codes[number]

    def close(self) -> None:
        """Closes the environments; the interpreter waits CLOSE_SECONDS, and kills what remains of their processes."""
        for channel in self.channels:
            channel.hang_up()
        os.close(self._ended)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(3 * CLOSE_SECONDS)
        self._process.kill()
        self._process.wait()
        for channel in self.channels:
            channel.pipe.close()


class Channel:
    """The end of a process that serves an environment."""

    def __init__(self, interpreter: Interpreter, number: int, pipe: socket.socket):
        self._interpreter, self._number, self.pipe = interpreter, number, pipe
        self._has_replied = select.poll()
        self._has_replied.register(pipe, select.POLLIN)
        self._begun = self._has_answered = False

    def begin(self, method: str, *arguments: Any) -> None:
        """Sends a request, for whose reply the next `ask` waits."""
        self._begun = True
        with contextlib.suppress(OSError):  # which `ask` reports
            self.pipe.sendall(packed((method, arguments)))

    def ask(self, setting: str, seconds: float, method: str, *arguments: Any) -> Any:
        """Returns the reply to a request. Raises BrokenEnvironment or UsageError; `setting` begins their message."""
        if not self._begun:
            self.begin(method, *arguments)
        self._begun = False
        until = time.monotonic() + seconds
        try:
            kind, value = self._received(until)
            self._has_answered = True
        except TimeoutError:
            what = "it has not answered in time; it hangs, or a step of it is too slow"
            raise BrokenEnvironment(f"{setting}: {what}") from None
        except (EOFError, OSError):
            code = self._interpreter.exit_code(self._number, CLOSE_SECONDS)
            what = f"the process of an environment ended{f' with exit code {code}' * bool(code)}"
            needs = "; environment.python must be Python 3.8 or later and have NumPy" * (not self._has_answered)
            raise BrokenEnvironment(f"{setting}: {what}{needs}") from None
        if kind != "result":
            raise (UsageError if kind == "usage" else BrokenEnvironment)(f"{setting}: {value}")
        return value

    def _received(self, until: float) -> Any:
        while not self._has_replied.poll(1000):
            if self._interpreter.exit_code(self._number) is not None:  # processes that it started may hold its pipe
                raise EOFError
            if time.monotonic() > until:
                raise TimeoutError
        return received(self.pipe)

    def hang_up(self) -> None:
        """Lets the environment close, without waiting for it."""
        with contextlib.suppress(OSError):  # it has ended, or is closed
            self.pipe.shutdown(socket.SHUT_WR)


class ProcessEnvironment(gymnasium.Env[Any, Any]):
    """An environment in another process, whose methods return what its own do; old ones of gym are understood.

    `info` keeps the number of lives, masks, and the numbers that are asked for. Every method raises BrokenEnvironment,
    with the user's line, if the environment fails.
    """

    def __init__(
        self, channel: Channel, task: str, seed: int, is_rendered: bool, names: tuple[str, ...], /, **settings: Any
    ):
        """`names`: of numbers in `info`; others as of `gymnasium_tasks.make`. Raises UsageError for a wrong name."""
        self.channel, self._ask = channel, functools.partial(channel.ask, f"environment.task={task}")
        module, _, name = task.partition(":")[2].rpartition(":")
        arguments = module, name, settings, seed, is_rendered, names
        observation, action, can_render, rate = self._ask(START_SECONDS, "make", *arguments)
        self.observation_space, self.action_space = _space(observation), _space(action)
        self.metadata = {"render_modes": ["rgb_array"] * can_render, "render_fps": rate}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Starts an episode; returns observation, info."""
        return self._ask(ANSWER_SECONDS if seed is None else START_SECONDS, "reset", seed, options)

    def step(self, action: Any) -> Any:
        """Returns observation, reward, terminated, truncated, info."""
        return self._ask(ANSWER_SECONDS, "step", action)

    def render(self) -> Any:
        """Returns the picture."""
        return self._ask(ANSWER_SECONDS, "render")

    def close(self) -> None:
        """Lets the environment close; its interpreter waits for it."""
        self.channel.hang_up()


class Processes(SyncVectorEnv):  # type: ignore[type-arg]
    """Environments of `gymnasium_tasks.make`, each `ProcessEnvironment`, which step at the same time."""

    envs: list[Any]

    def __init__(self, functions: Sequence[Callable[[], Any]]):
        """`functions`: make the environments, at the same time. Raises the error of one that fails."""
        with ThreadPoolExecutor(len(functions)) as threads:
            made = [threads.submit(function) for function in functions]
        super().__init__([environment.result for environment in made])

    def begin_reset(self, seeds: list[int | None] | None) -> None:
        """Starts `reset` with these seeds."""
        for environment, seed in zip(self.envs, seeds or [None] * self.num_envs, strict=True):
            environment.unwrapped.channel.begin("reset", seed, None)

    def begin_step(self, actions: np.ndarray) -> None:
        """Starts `step` with these actions; after an episode's end, it is a reset."""
        for environment, action, resets in zip(self.envs, actions, self._autoreset_envs, strict=True):
            request = ("reset", None, None) if resets else ("step", environment.accepted(action))
            environment.unwrapped.channel.begin(*request)


def described_apart(function: Callable[[Config], EnvironmentSpec], config: Config) -> EnvironmentSpec:
    """Returns what a function returns in another process. Raises its errors, and BrokenEnvironment if it hangs."""
    values = {name: json.loads(yaml_text(attrgetter(name)(config))) for name in SETTINGS}
    call = json.dumps([function.__module__, function.__name__, values])
    with contextlib.closing(Interpreter("", 1)) as interpreter:
        arguments = START_SECONDS, "call", __name__, _described.__name__, call
        text = interpreter.channels[0].ask(f"environment.task={config.environment.task}", *arguments)
    kind, found = json.loads(text)
    if kind != "result":
        raise (UsageError if kind == "usage" else BrokenEnvironment)(found)
    return of_record(found)


def _described(call: str) -> str:
    module, name, values = json.loads(call)
    try:
        return json.dumps(["result", as_record(getattr(importlib.import_module(module), name)(config_of(values)))])
    except (UsageError, RunError) as error:
        return json.dumps(["usage" if isinstance(error, UsageError) else "broken", str(error)])


def _space(described: tuple[str, dict[str, Any]]) -> spaces.Space[Any]:
    """Returns the space of Gymnasium that `served` describes."""
    kind, given = described
    if "dtype" in given:
        given["dtype"] = np.dtype(given["dtype"]).type
    if kind == "Dict":
        given["spaces"] = [(key, _space(part)) for key, part in given["spaces"]]  # in this order
    if kind == "Tuple":
        given["spaces"] = [_space(part) for part in given["spaces"]]
    space: spaces.Space[Any] = getattr(spaces, kind)(**given)
    return space
