"""The environments of a run: each `Step` states where episodes begin and how they end.

EnvPool and `GymnasiumPool` reset on the step *after* an episode's end: that step ignores its action and
returns the first observation of the next episode. A `Step` marks it `first`; it is not a transition, and its reward is
0 (EnvPool's tasks with continuous actions repeat the last reward there, or return uninitialised memory). Invalid
actions would crash the process inside EnvPool, so `VectorEnvironment.send` checks them first.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np

from apex_jax.config import Config
from apex_jax.environments import batches, envpool_tasks, gymnasium_pool
from apex_jax.environments.batches import BatchPool
from apex_jax.environments.envpool_tasks import family_of, flattened, make_pool
from apex_jax.environments.gymnasium_pool import GymnasiumPool
from apex_jax.types import ActionSpec, EnvironmentSpec, Observation, SegmentSpec, StackSpec, Step, map_parts

_log = logging.getLogger(__name__)


def describe(config: Config, is_tried: bool = False) -> EnvironmentSpec:
    """Describes the run's task; a process does so once, and passes the description on.

    `is_tried`: makes some steps with an environment of Gymnasium, so that its mistakes are found before anything
    starts. Those written in JAX are traced, and EnvPool's are known. Raises UsageError for a task that does not exist
    or that no agent here can learn, RunError if an environment of Gymnasium or JAX fails.
    """
    if config.environment.is_jax:
        from apex_jax.environments import jax_tasks  # imported here, as below: JAX takes a second

        return jax_tasks.describe(config)
    if config.environment.is_vector:
        return batches.describe(config)
    if config.environment.is_gymnasium:
        return gymnasium_pool.describe(config, is_tried)
    return envpool_tasks.describe(config)


def log_reading(environment_spec: EnvironmentSpec) -> None:
    """Logs how observations are interpreted, because a wrong interpretation prevents learning."""
    if environment_spec.reading:
        _log.info("%s", environment_spec.reading)
    if environment_spec.caution:
        _log.warning("%s", environment_spec.caution)


class VectorEnvironment:
    """A pool of environments of one task, stepped by `send` then `receive`.

    `receive` returns `per_step` environments (all of them if 0). The next `send` must cover exactly these,
    except those given to `leave_out`.
    """

    def __init__(
        self,
        config: Config,
        environment_spec: EnvironmentSpec,
        seeds: np.ndarray,
        max_episode_frames: int,
        threads: int = 0,
        per_step: int = 0,
        rendered: bool = False,
    ):
        """Starts the pool and its first episodes. `seeds`: int[E], one each; `rendered`: `render` returns frames."""
        self.num_environments = len(seeds)
        self._rendered = rendered
        self._described, self._spec = environment_spec, environment_spec.spec
        self._parts = self._spec.observation
        self._info = config.metrics.info
        environment = config.environment
        if environment.is_gymnasium:
            options = max_episode_frames, per_step or len(seeds), rendered, self._info
            self._pool: Any = GymnasiumPool(environment, environment_spec, seeds, *options)
        elif environment.is_vector:
            self._pool = BatchPool(config, environment_spec, seeds, per_step or len(seeds), rendered)
        elif environment.is_jax:
            from apex_jax.environments.jax_tasks import JaxPool

            self._pool = JaxPool(config, seeds, max_episode_frames, per_step)
        else:
            self._pool = make_pool(environment, seeds, max_episode_frames, threads, per_step, rendered)
        # Those with spaces return vectors already, Atari and JAX stacks.
        parts = () if environment.has_spaces else environment_spec.parts or ()
        self._names = [part.name for part in parts if part.path] or None
        self._stacks = None if environment.is_atari or environment.is_jax else _Stacks(self._spec, len(seeds))
        self._first = np.ones(self.num_environments, bool)
        self._lives = np.zeros(self.num_environments, np.int32)
        self._waits = np.zeros(self.num_environments, bool)  # whether its last step was received, and no action sent
        self.reset()

    def reset(self) -> None:
        """Starts a new episode in every environment, even in mid-game; `receive` returns their first observations.

        Must not be called between `send` and `receive`: EnvPool would end the process.
        """
        self._first[:] = True
        self._waits[:] = False
        self._pool.async_reset()

    def receive(self) -> Step:
        """Waits until the next environments have stepped, and returns them."""
        observation, reward, terminated, truncated, info = self._pool.recv()
        env_id = info["env_id"]
        self._waits[env_id] = True
        first = self._first[env_id]
        lives = info.get("lives", np.zeros(len(env_id), np.int32))
        life_lost = ~first & (lives < self._lives[env_id])
        self._lives[env_id] = lives
        self._first[env_id] = terminated | truncated
        observation = map_parts(self._typed, self._parts, flattened(observation, self._names))
        if self._stacks is not None:
            observation = self._stacks.push(observation, env_id, first)
        reward = np.where(first, 0, reward).astype(np.float32)
        numbers = np.full((len(env_id), len(self._info)), np.nan, np.float32)
        for column, name in enumerate(self._info):
            if np.shape(info.get(name)) == (len(env_id),):  # EnvPool has arrays of other shapes, too
                numbers[:, column] = info[name]
        return Step(env_id, observation, reward, first, terminated, truncated, life_lost, numbers)

    def _typed(self, part: StackSpec, array: np.ndarray) -> np.ndarray:
        """Returns a part of observations as [A, *O], or [A, F, *O] of the tasks that return stacks."""
        stack = (part.stack,) if self._stacks is None else ()
        return np.reshape(array, (len(array), *stack, *part.shape)).astype(part.dtype, copy=False)

    def send(self, action: np.ndarray, env_id: np.ndarray) -> None:
        """Starts the next step of the environments `env_id`, as `receive` returned them; does not wait for it.

        `action`: as in the spec, [A, ...]. Raises ValueError for arguments with which EnvPool would crash or wait for
        ever.
        """
        environments, spec = range(self.num_environments), self._spec.action
        is_allowed = _are_actions(action, spec, env_id.size) and _all_in(env_id, environments)
        if not (is_allowed and np.array_equal(np.sort(env_id), np.flatnonzero(self._waits))):
            what = f"one action in [{spec.low}, {spec.high}] is needed for each environment that stepped last"
            raise ValueError(f"actions {action} of environments {env_id}: {what}; EnvPool would crash or hang")
        self._waits[env_id] = False
        self._pool.send(self._described.scaled(action), env_id)

    def leave_out(self, env_id: np.ndarray) -> None:
        """Excludes environments that `receive` returned from the next `send`; they do nothing until `reset`."""
        self._waits[env_id] = False

    def render(self) -> np.ndarray | None:
        """Returns the frame of environment 0: uint8[height, width, 3]; None if the game cannot be rendered."""
        if not self._rendered:
            return None
        try:
            frame = self._pool.render()[0]
            return None if frame is None else np.asarray(frame)
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            return None

    def close(self) -> None:
        """Stops the pool's threads, or closes the environments of Gymnasium."""
        self._pool.close()


class _Stacks:
    """The newest frames and vectors of each environment; the first ones of an episode fill its stack."""

    def __init__(self, spec: SegmentSpec, num_environments: int):
        self._stacks = spec.zeros(num_environments) if spec.frame_stack > 1 else None

    def push(self, observation: Observation, env_id: np.ndarray, first: np.ndarray) -> Observation:
        """Returns observations [A, F, *O] that end with these frames, vectors and masks [A, *O]."""
        if self._stacks is None:
            return map_parts(lambda array: array[:, None], observation)

        def pushed(stacks: np.ndarray, newest: np.ndarray) -> np.ndarray:
            stack = stacks[env_id]  # a copy
            stack[:, :-1] = stack[:, 1:]
            stack[:, -1] = newest
            stack[first] = newest[first][:, None]
            stacks[env_id] = stack
            return stack

        return map_parts(pushed, self._stacks, observation)


def has_reference_simulator(config: Config) -> bool:
    """Returns whether the task is one of DM control or Gym MuJoCo, whose own simulator can show an episode."""
    environment = config.environment
    return not environment.has_spaces and family_of(environment.task) in ("mujoco.dmc", "mujoco.gym")


def can_render(config: Config, environment_spec: EnvironmentSpec) -> bool:
    """Returns whether a game of the run's task can be rendered, see `VectorEnvironment.render`.

    False for all of EnvPool's MuJoCo: without a display and its libraries, EnvPool would end the process in `render`.
    """
    if config.environment.has_spaces:
        return environment_spec.frames_per_second is not None
    if config.environment.is_atari or family_of(config.environment.task).startswith("mujoco"):
        return config.environment.is_atari
    environment = VectorEnvironment(config, environment_spec, np.zeros(1), 16, rendered=True)
    try:
        environment.receive()
        return environment.render() is not None
    finally:
        environment.close()


class Episode(NamedTuple):
    """A finished full game, over all its lives, with raw rewards."""

    env_id: int
    episode_return: float
    steps: int
    info: tuple[float, ...] = ()  # K numbers, see `Step`, at the last step


class EpisodeTracker:
    """Adds up raw rewards of full games."""

    def __init__(self, num_environments: int):
        self._returns = np.zeros(num_environments, np.float64)
        self._steps = np.zeros(num_environments, np.int64)

    def add(self, step: Step) -> list[Episode]:
        """Returns the games that ended with this step."""
        self._returns[step.env_id] += step.reward
        self._steps[step.env_id] += ~step.first
        rows = np.flatnonzero(step.terminated | step.truncated)
        ended = step.env_id[rows]
        episodes = [
            Episode(int(i), float(self._returns[i]), int(self._steps[i]), tuple(step.info[row].tolist()))
            for i, row in zip(ended, rows, strict=True)
        ]
        self._returns[ended] = 0
        self._steps[ended] = 0
        return episodes


def _all_in(values: np.ndarray, allowed: range) -> bool:
    """Returns whether `values` are integers, at least one, and all in `allowed`."""
    is_whole = values.dtype.kind in "iu" and values.size > 0
    return bool(is_whole and values.min() >= allowed.start and values.max() < allowed.stop)


def _are_actions(action: np.ndarray, spec: ActionSpec, count: int) -> bool:
    """Returns whether `action` has `count` actions of the spec, whatever its integer type."""
    if action.shape != (count, *spec.shape):
        return False
    if spec.dtype == "int32":
        return _all_in(action, range(spec.num_actions))
    return bool((np.abs(action) <= spec.high).all())  # False for NaN
