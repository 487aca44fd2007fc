"""Environments of Gymnasium behind the interface of EnvPool's pools: `send`, `recv`, `async_reset`, `render`, `close`.

They are Gymnasium's own vector environments, one for each group that is acted on at once, so that one group steps while
the actor computes the actions of another. They reset on the step after an episode's end, as EnvPool does.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import logger
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from apex_jax.config import EnvironmentConfig
from apex_jax.environments.gymnasium_tasks import BrokenEnvironment, make

START_SECONDS = 240.0  # until the first observation
ANSWER_SECONDS = 50.0  # of a step or reset; the supervisor kills an actor that makes no progress for 60
CLOSE_SECONDS = 2.0
PRELOADED = ["apex_jax.environments.gymnasium_tasks"]  # by the process from which those of environments are forked

Result = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]


class GymnasiumPool:
    """Environments in groups; `recv` returns the groups in the order in which they were sent.

    With `environment.own_processes`, each environment runs in a process of its own. Its methods raise BrokenEnvironment
    if an environment fails, ends its process, or does not answer in time.
    """

    def __init__(
        self,
        environment: EnvironmentConfig,
        seeds: np.ndarray,
        max_steps: int,
        per_step: int,
        rendered: bool,
    ):
        """`seeds`: int[E]; `max_steps`: of an episode; `per_step`: environments of a group.

        `rendered`: environment 0 can be rendered.
        """
        logger.min_level = logger.ERROR + 1  # `_Group` raises what Gymnasium would log as well
        self._frame_stack = environment.frame_stack
        members = np.array_split(np.arange(len(seeds)), -(-len(seeds) // per_step))
        parts = [
            functools.partial(make, environment.task, environment.settings, max_steps, rendered and i == 0, int(seed))
            for i, seed in enumerate(seeds)
        ]
        self._groups = [_Group(environment, ids, [parts[i] for i in ids], seeds[ids]) for ids in members]
        self._sent: deque[_Group] = deque()
        self._stacks: np.ndarray | None = None  # uint8[E, F, *O] of pixels, see `_stacked`

    def async_reset(self) -> None:
        """Starts a new episode in every environment."""
        for group in self._groups:
            group.reset()
        self._sent = deque(self._groups)

    def send(self, actions: np.ndarray, env_id: np.ndarray) -> None:
        """Starts the next step of whole groups; `actions` [A, ...] for the environments `env_id`, int[A]."""
        rows = np.full(sum(len(group.ids) for group in self._groups), -1)
        rows[env_id] = np.arange(len(env_id))
        for group in self._groups:
            if rows[group.ids[0]] >= 0:
                group.step(actions[rows[group.ids]])
                self._sent.append(group)

    def recv(self) -> Result:
        """Waits for the group that was sent first: observations [A, ...], rewards, terminated, truncated, infos.

        Pixels are the newest frames of an episode, uint8[A, F, *O]; the first frame of an episode fills its stack.
        """
        group = self._sent.popleft()
        observation, reward, terminated, truncated, info = group.receive()
        infos = {"env_id": group.ids}
        if "lives" in info:
            infos["lives"] = np.asarray(info["lives"], np.int32)
        if observation.dtype == np.uint8:
            observation = self._stacked(observation, group)
        group.begins = terminated | truncated
        return observation, reward, terminated, truncated, infos

    def render(self) -> tuple[np.ndarray | None, ...]:
        """Returns the screen of environment 0, uint8[height, width, 3]."""
        return self._groups[0].vector.call("render")

    def close(self) -> None:
        """Ends the environments and their processes."""
        for group in self._groups:
            with contextlib.suppress(Exception):  # of an environment's own `close`
                group.vector.close()

    def _stacked(self, frames: np.ndarray, group: _Group) -> np.ndarray:
        if self._stacks is None:
            count = sum(len(group.ids) for group in self._groups)
            self._stacks = np.zeros((count, self._frame_stack, *frames.shape[1:]), np.uint8)
        stack = self._stacks[group.ids]  # a copy
        stack[:, :-1] = stack[:, 1:]
        stack[:, -1] = frames
        stack[group.begins] = frames[group.begins][:, None]
        self._stacks[group.ids] = stack
        return stack


class _Processes(AsyncVectorEnv):
    """Can be closed even if environments have failed or hang, for which Gymnasium's own method waits for ever."""

    def close_extras(self, timeout: float | None = CLOSE_SECONDS, terminate: bool = False) -> None:
        """Asks the processes to end, waits up to `timeout` seconds, and kills the remaining ones."""
        until = time.monotonic() + (0.0 if terminate else timeout or 0.0)
        pipes = [pipe for pipe in self.parent_pipes if pipe is not None and not pipe.closed]
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(("close", None))
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


class _Group:
    """Environments that step together."""

    def __init__(
        self, environment: EnvironmentConfig, ids: np.ndarray, functions: list[Callable[[], Any]], seeds: np.ndarray
    ):
        self.ids = ids.astype(np.int32)
        self.begins = np.ones(len(ids), bool)  # whether the next observation is the first of an episode
        self._task = environment.task
        self._seeds: list[int | None] | None = [int(seed) for seed in seeds]
        self._actions: np.ndarray | None = None  # None: reset
        self.vector: AsyncVectorEnv | SyncVectorEnv
        if environment.own_processes:
            # Processes are not forked from this one, whose threads, JAX's among them, may hold locks.
            multiprocessing.set_forkserver_preload(PRELOADED)
            with self._reported():
                self.vector = _Processes(functions, context="forkserver")
        else:
            self.vector = SyncVectorEnv(functions)

    def reset(self) -> None:
        self._actions = None
        self.begins[:] = True
        if isinstance(self.vector, AsyncVectorEnv):
            with self._reported():
                self.vector.reset_async(seed=self._seeds)

    def step(self, actions: np.ndarray) -> None:
        self._actions = actions
        if isinstance(self.vector, AsyncVectorEnv):
            with self._reported():
                self.vector.step_async(actions)

    def receive(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Returns the result of `reset` or `step`: observations, rewards, terminated, truncated, infos."""
        with self._reported():
            if self._actions is not None:
                if isinstance(self.vector, AsyncVectorEnv):
                    return self.vector.step_wait(timeout=ANSWER_SECONDS)
                return self.vector.step(self._actions)
            if isinstance(self.vector, AsyncVectorEnv):
                observation, info = self.vector.reset_wait(START_SECONDS if self._seeds else ANSWER_SECONDS)
            else:
                observation, info = self.vector.reset(seed=self._seeds)
        self._seeds = None
        none = np.zeros(len(self.ids), bool)
        return observation, np.zeros(len(self.ids)), none, none, info

    @contextlib.contextmanager
    def _reported(self) -> Any:
        """Raises BrokenEnvironment if a process of an environment has ended or does not answer."""
        try:
            yield
        except multiprocessing.TimeoutError:
            what = "has not answered in time; it hangs, or a step of it is too slow"
            raise BrokenEnvironment(
                f"environment.task={self._task}: one of {len(self.ids)} environments {what}"
            ) from None
        except (EOFError, OSError):
            vector = getattr(self, "vector", None)
            for process in getattr(vector, "processes", []):
                process.join(0.1)
            codes = [process.exitcode for process in getattr(vector, "processes", []) if process.exitcode is not None]
            code = f" with exit code {codes[0]}" if codes else ""
            raise BrokenEnvironment(
                f"environment.task={self._task}: the process of an environment ended{code}"
            ) from None
