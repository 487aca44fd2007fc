"""Environments of Gymnasium behind the interface of EnvPool's pools: `send`, `recv`, `async_reset`, `render`, `close`.

They are Gymnasium's own vector environments, one for each group that is acted on at once, so that one group steps while
the actor computes the actions of another. They reset on the step after an episode's end, as EnvPool does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import logger
from gymnasium.vector import SyncVectorEnv

from apex_jax.config import Config, EnvironmentConfig
from apex_jax.environments.gymnasium_tasks import BEYOND, NOTES, Looked, described, look, make
from apex_jax.environments.processes import Interpreter, Processes
from apex_jax.types import EnvironmentSpec, Observation

_log = logging.getLogger(__name__)

Result = tuple[Observation, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]


class GymnasiumPool:
    """Environments in groups; `recv` returns the groups in the order in which they were sent.

    With `environment.own_processes`, each environment runs in a process of its own. Its methods raise BrokenEnvironment
    if an environment fails, ends its process, or does not answer in time.
    """

    def __init__(
        self,
        environment: EnvironmentConfig,
        described: EnvironmentSpec,
        seeds: np.ndarray,
        max_steps: int,
        per_step: int,
        rendered: bool,
        info: tuple[str, ...] = (),
    ):
        """`described`: the task; `seeds`: int[E]; `max_steps`: of an episode; `per_step`: environments of a group.

        `rendered`: environment 0 can be rendered; `info`: numbers that `recv` returns of the end of an episode.
        """
        logger.min_level = logger.ERROR + 1  # `_Group` raises what Gymnasium would log as well
        self._task, self._info = environment.task, info
        self._beyond = 0  # observations beyond the bounds of their space
        self._noted = set[str]()  # of NOTES, each logged once
        members = np.array_split(np.arange(len(seeds)), -(-len(seeds) // per_step))
        is_apart = environment.own_processes or environment.python != ""
        self._interpreter = Interpreter(environment.python, len(seeds), environment.task) if is_apart else None
        channels = self._interpreter.channels if self._interpreter else [None] * len(seeds)
        same = environment.observation_layout, info, described.spec.action.is_masked
        task = environment.task, environment.settings, max_steps
        parts = [
            functools.partial(make, *task, rendered and i == 0, int(seed), *same, channels[i])
            for i, seed in enumerate(seeds)
        ]
        self._groups: list[_Group] = []
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            for ids in members:
                self._groups.append(_Group(ids, [parts[i] for i in ids], seeds[ids], is_apart))
            failed.pop_all()
        self._sent: deque[_Group] = deque()

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
        """Waits for the group that was sent first: observations [A, *O], rewards, terminated, truncated, infos."""
        group = self._sent.popleft()
        observation, reward, terminated, truncated, info = group.receive()
        infos = {"env_id": group.ids}
        self._beyond += int(np.sum(info.get(BEYOND, 0)))
        for name in {*NOTES} & info.keys() - self._noted:
            self._noted.add(name)
            _log.warning("environment.task=%s: %s", self._task, next(line for line in info[name] if line))
        if "lives" in info:
            infos["lives"] = np.asarray(info["lives"], np.int32)
        for name in self._info:
            if name in info:  # the info of at least one environment has it
                infos[name] = np.where(info[f"_{name}"], info[name], np.nan)
        return observation, reward, terminated, truncated, infos

    def render(self) -> tuple[np.ndarray | None, ...]:
        """Returns the frame of environment 0, uint8[height, width, 3]."""
        return self._groups[0].vector.call("render")

    def close(self) -> None:
        """Ends the environments and their processes."""
        if self._beyond:
            _log.info("%d observations were beyond the bounds of their space", self._beyond)
        if self._interpreter is not None:
            self._interpreter.close()
        for group in self._groups:
            with contextlib.suppress(Exception):  # of an environment's own `close`
                group.vector.close()


class _Group:
    """Environments that step together."""

    def __init__(self, ids: np.ndarray, functions: list[Callable[[], Any]], seeds: np.ndarray, is_apart: bool):
        """`is_apart`: whether each environment has a process of its own."""
        self.ids = ids.astype(np.int32)
        self._seeds: list[int | None] | None = [int(seed) for seed in seeds]
        self._actions: np.ndarray | None = None  # None: reset
        self.vector: SyncVectorEnv[Any, Any] = Processes(functions) if is_apart else SyncVectorEnv(functions)

    def reset(self) -> None:
        self._actions = None
        if isinstance(self.vector, Processes):
            self.vector.begin_reset(self._seeds)

    def step(self, actions: np.ndarray) -> None:
        self._actions = actions
        if isinstance(self.vector, Processes):
            self.vector.begin_step(actions)

    def receive(self) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Returns the result of `reset` or `step`: observations, rewards, terminated, truncated, infos."""
        if self._actions is not None:
            return self.vector.step(self._actions)
        observation, info = self.vector.reset(seed=self._seeds)
        self._seeds = None
        none = np.zeros(len(self.ids), bool)
        return observation, np.zeros(len(self.ids)), none, none, info


TRIED_STEPS = 10  # before anything starts


_looked_before: dict[tuple[Any, ...], Looked] = {}  # by the arguments of `look`: for the next description alone


def describe(config: Config, is_tried: bool, is_kept: bool = False) -> EnvironmentSpec:
    """Makes and closes an environment in a process of its own, and describes it; `is_tried`: makes some steps, too.

    So no code of a user runs in learner and replay server. `is_kept`: the next description is of what this one has
    seen, since some environments take long to make. Raises UsageError or BrokenEnvironment, see
    `gymnasium_tasks.describe`.
    """
    environment, steps = config.environment, TRIED_STEPS if is_tried else 0
    arguments = environment.task, environment.settings, environment.observation_layout, config.seed
    looked = None if is_kept else _looked_before.pop((*arguments, environment.python), None)
    if looked is None:
        with contextlib.closing(Interpreter(environment.python, 1)) as interpreter:
            looked = look(*arguments, steps, interpreter.channels[0])
    result = described(config, looked)
    if is_kept:
        _looked_before[*arguments, environment.python] = looked
    return result
