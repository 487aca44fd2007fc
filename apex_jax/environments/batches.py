"""Batches of one's own, `vector:MODULE:FUNCTION`: a `gymnasium.vector.VectorEnv`, one for each actor process.

The function is called with `num_envs` and `environment.settings`. The batch must reset an environment on the step after
an episode's end, as EnvPool does (AutoresetMode.NEXT_STEP), so that the last observation is not lost.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from operator import itemgetter
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from apex_jax.config import Config
from apex_jax.environments.gymnasium_pool import TRIED_STEPS, Result
from apex_jax.environments.gymnasium_tasks import LARGEST, Adapted, described, looked_at, reported_of
from apex_jax.environments.images import picture
from apex_jax.environments.processes import described_apart
from apex_jax.environments.served import rendering
from apex_jax.environments.task import BrokenEnvironment
from apex_jax.host.errors import UsageError
from apex_jax.host.user_code import imported_names
from apex_jax.types import (
    ACTION_MASK,
    FRAMES,
    MASK,
    NUMBERS,
    EnvironmentSpec,
    Observation,
    frames_of,
    joined,
    map_parts,
    named_parts,
    valid_actions,
)


class Batch:
    """The user's batch of N environments; every method raises BrokenEnvironment if it fails."""

    def __init__(self, config: Config, size: int, rendered: bool = False):
        """Raises UsageError for a wrong name, or spaces or a way to reset with which no agent here can learn."""
        task = self._task = config.environment.task
        [function] = imported_names("environment.task", task)
        with reported_of(task, function):
            vector = rendering(function, rendered)(num_envs=size, **json.loads(config.environment.settings))
            if not isinstance(vector, VectorEnv):
                raise TypeError(f"it returned {type(vector).__name__}, not a gymnasium.vector.VectorEnv")
        mode = vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if AutoresetMode(mode) is not AutoresetMode.NEXT_STEP or vector.num_envs != size:
            what = f"returned {vector.num_envs} environments with {mode}"
            fix = f"it must make num_envs={size} with autoreset_mode=NEXT_STEP: else the last observation is lost"
            raise UsageError(f"environment.task={task}: it {what}; {fix}")
        single = gymnasium.Env[Any, Any]()
        single.observation_space, single.action_space = vector.single_observation_space, vector.single_action_space
        self.vector, self.single = vector, Adapted(single, task, config.environment.observation_layout)

    def reset(self, seed: int | None) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode in each environment; returns observations [N, *O] and info."""
        with reported_of(self._task, self.vector.reset):
            observation, info = self.vector.reset(seed=seed)
            return self._adapted(observation, info, np.zeros(self.vector.num_envs, bool)), info

    def step(self, actions: np.ndarray) -> Result:
        """Steps all environments; returns observations, rewards, terminated, truncated, info."""
        with reported_of(self._task, self.vector.step):
            observation, reward, *ends, info = self.vector.step(actions)
            reward, terminated, truncated = (np.asarray(each) for each in (reward, *ends))
            if not (np.abs(reward) <= LARGEST).all():  # not for NaN, either
                raise BrokenEnvironment(f"environment.task={self._task}: it returned a reward that is not finite")
            return self._adapted(observation, info, terminated | truncated), reward, terminated, truncated, info

    def _adapted(self, observation: Any, info: dict[str, Any], has_ended: np.ndarray) -> Observation:
        single, parts = self.single, {}
        if single.images:
            frames = [image.frames(self._value(observation, image.path, image.shape)) for image in single.images]
            parts[FRAMES] = frames_of(single.images, frames)
        if single.parts:
            values = ((part, self._value(observation, part.path, part.shape)) for part in single.parts)
            vectors = [part.flattened(value, value.shape[:1]) for part, value in values]
            parts[NUMBERS] = np.concatenate(vectors, axis=1)
            if not np.isfinite(parts[NUMBERS]).all():
                raise ValueError("an observation is not finite as float32")
        if single.is_masked:
            valid = valid_actions((observation if single.masks_are_observed else info)[ACTION_MASK], single.counts)
            parts[MASK] = (valid | has_ended[:, None]).astype(np.uint8)
        return joined(parts)

    def _value(self, observation: Any, path: tuple[str | int, ...], shape: tuple[int, ...]) -> np.ndarray:
        for key in path:
            observation = observation[key]
        array = np.asarray(observation)
        if array.shape != (expected := (self.vector.num_envs, *shape)):
            raise ValueError(f"an observation{''.join(f'[{key}]' for key in path)} of {array.shape}, not {expected}")
        return array


def describe(config: Config) -> EnvironmentSpec:
    """Makes a batch of one in a process of its own, steps it, and describes it."""
    return described_apart(_described, config)


def _described(config: Config) -> EnvironmentSpec:
    batch = Batch(config, 1)
    with contextlib.closing(batch.vector):
        single, rng = batch.single, np.random.default_rng(config.seed)
        single.is_masked = single.is_masked or ACTION_MASK in batch.reset(config.seed)[1]
        observation, _ = batch.reset(None)
        largest = 0.0
        for _ in range(TRIED_STEPS):
            largest = max(largest, float(np.abs(named_parts(observation).get(NUMBERS, 0.0)).max()))
            action = single.random_action(observation, rng)
            observation = batch.step(np.array([action], single.env.action_space.dtype))[0]
        return described(config, looked_at(single, batch.vector.metadata, largest))


class BatchPool:
    """A batch behind the interface of EnvPool's pools; it steps when all that `recv` has returned were sent."""

    def __init__(self, config: Config, described: EnvironmentSpec, seeds: np.ndarray, per_step: int, rendered: bool):
        """`seeds`: int[N], of which the batch gets the first; `per_step`: environments of a group."""
        size = len(seeds)
        self._batch, self._info = Batch(config, size, rendered), config.metrics.info
        self._seed: int | None = int(seeds[0])
        self._batch.single.is_masked, self._described = described.spec.action.is_masked, described
        spec = described.spec.action
        self._actions = described.scaled(np.zeros((size, *spec.shape), spec.dtype))  # of those that are left out, too
        self._groups = np.array_split(np.arange(size, dtype=np.int32), -(-size // per_step))
        self._ready, self._sent = deque[np.ndarray](), deque[np.ndarray]()

    def async_reset(self) -> None:
        """Starts a new episode in every environment."""
        observation, info = self._batch.reset(self._seed)
        self._seed = None
        none = np.zeros(len(self._actions), bool)
        self._result: Result = observation, np.zeros(len(self._actions)), none, none, info
        self._ready, self._sent = deque(self._groups), deque()

    def send(self, actions: np.ndarray, env_id: np.ndarray) -> None:
        """Gives whole groups their actions, [A, ...] for `env_id`, int[A]."""
        self._actions[env_id] = actions
        self._sent += [group for group in self._groups if group[0] in env_id]

    def recv(self) -> Result:
        """Returns the group that was sent first: observations [A, *O], rewards, terminated, truncated, infos."""
        if not self._ready:
            if self._batch.single.is_masked:  # an action of before may be invalid for those that are left out
                rests = np.setdiff1d(np.arange(len(self._actions)), np.concatenate(self._sent))
                self._actions[rests] = self._described.scaled(named_parts(self._result[0])[MASK][rests].argmax(1))
            self._result, self._ready, self._sent = self._batch.step(self._actions), self._sent, deque()
        ids = self._ready.popleft()
        observation, *arrays, info = self._result
        numbers = {name: info[name] for name in self._info if np.shape(info.get(name, 0.0)) == self._actions.shape[:1]}
        found = {name: np.where(info.get(f"_{name}", True), each, np.nan) for name, each in numbers.items()}
        lives = {"lives": np.asarray(info["lives"], np.int32)} if "lives" in info else {}
        infos = {name: array[ids] for name, array in (found | lives).items()}
        reward, terminated, truncated = (array[ids] for array in arrays)
        return map_parts(itemgetter(ids), observation), reward, terminated, truncated, {"env_id": ids, **infos}

    def render(self) -> tuple[np.ndarray | None]:
        """Returns the picture of environment 0, uint8[height, width, 3]."""
        with contextlib.suppress(Exception):  # else no video is made, and the run continues
            frames: Any = self._batch.vector.render()
            return (None if frames is None else picture(frames[0]),)
        return (None,)

    def close(self) -> None:
        """Closes the batch."""
        self._batch.vector.close()
