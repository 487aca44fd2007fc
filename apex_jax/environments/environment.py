"""Wraps EnvPool: each `Step` states where episodes begin and how they end.

EnvPool resets on the step *after* an episode's end: that step ignores its action and returns the first observation of
the next episode. A `Step` marks it `first`; it is not a transition, and its reward is 0 (EnvPool's tasks with
continuous actions repeat the last reward there, or return uninitialised memory). Invalid actions would crash the
process inside EnvPool, so `Environment.send` checks them first.
"""

from __future__ import annotations

import contextlib
import difflib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import envpool
import envpool.registration
import numpy as np

from apex_jax.config import Config
from apex_jax.environments.observations import flattened, parts_of, size_of
from apex_jax.host.errors import UsageError, first_line
from apex_jax.host.machine import usable_cores
from apex_jax.segment_codec import max_slots
from apex_jax.types import MAX_SEGMENT_BYTES, ActionSpec, Interface, SegmentSpec, Step

UNBOUNDED = 1e6  # of an element of an action, see `action_bounds`


def segment_spec(config: Config) -> SegmentSpec:
    """Returns the geometry of the run's segments; raises UsageError for a task that EnvPool or this agent lacks."""
    task = config.environment.task
    known = envpool.list_all_envs()
    if task not in known:
        names = [name for name in known if name.lower() in (task.lower(), f"{task}-v5".lower())]
        names = names or difflib.get_close_matches(task, known, 3) or difflib.get_close_matches(f"{task}-v5", known, 3)
        raise UsageError(
            f"environment.task={task}: EnvPool has no such task; did you mean {', '.join(names) or 'Pong-v5'}?"
        )
    with _no_precision_warning():
        try:
            spec = envpool.make_spec(task, **_options(config, config.environment.max_episode_frames))
        except (ImportError, RuntimeError) as error:  # the game needs packages that are not installed
            raise UsageError(
                f"environment.task={task}: EnvPool cannot make it here ({first_line(error)}); choose another"
            ) from None
        observation, action = spec.gymnasium_observation_space, spec.gymnasium_action_space
    if spec.config.max_num_players > 1:
        raise UsageError(f"environment.task={task}: a game for several players; choose a task for one")
    is_atari, is_pixels, actions = _is_atari(task), observation.dtype == np.uint8, _action_spec(task, action)
    if not is_atari and (config.environment.frame_stack, config.environment.frame_skip) != (1, 1):
        fix = "set environment.frame_stack=1 environment.frame_skip=1"
        fix = fix if actions.dtype == "int32" else f"use --config walker environment.task={task}"
        raise UsageError(f"{task} has no frames to stack or skip: {fix}")
    if is_pixels and not is_atari:
        raise UsageError(f"environment.task={task}: this agent plays no pixel games but Atari's; choose one of those")
    parts = parts_of(task, spec)
    if parts is not None and not set(parts) <= set(getattr(observation, "spaces", ())):
        raise UsageError(f"environment.task={task}: its observations are not plain arrays; choose another task")
    segments = SegmentSpec(
        frame_shape=observation.shape[1:] if is_pixels else (size_of(observation, parts),),
        frame_dtype="uint8" if is_pixels else "float32",
        frame_stack=config.environment.frame_stack,
        slots=config.actor.segment_slots,
        n_step=config.algorithm.n_step,
        action=actions,
    )
    if segments.slots > (most := max_slots(segments)):  # for pixels, config_rules has checked this
        raise UsageError(
            f"actor.segment_slots={segments.slots}: must be at most {most}, with environment.task={task}, because a"
            f" segment is sent in one message of at most {MAX_SEGMENT_BYTES >> 20} MiB; lower it"
        )
    return segments


def interface_of(config: Config, spec: SegmentSpec) -> Interface:
    """Returns what observations and actions of the run's task look like; `spec`: see `segment_spec`."""
    task = config.environment.task
    with _no_precision_warning():
        made = envpool.make_spec(task)
        names = parts_of(task, made)
        observation, action = made.gymnasium_observation_space, made.gymnasium_action_space
    parts = None if names is None else {name: tuple(observation[name].shape) for name in names}
    if spec.action.dtype == "int32":
        return Interface(spec, parts, None, None)
    low, high = action_bounds(action)
    return Interface(spec, parts, tuple(low.tolist()), tuple(high.tolist()))


def _action_spec(task: str, space: Any) -> ActionSpec:
    if hasattr(space, "n"):
        return ActionSpec.discrete(int(space.n))
    if space.dtype is None or space.dtype.kind != "f" or len(space.shape) != 1:
        raise UsageError(
            f"environment.task={task}: no algorithm here has its actions, {space}; choose a task with discrete actions,"
            " such as Pong-v5, or with a vector of numbers, such as WalkerWalk-v1"
        )
    return ActionSpec.continuous(space.shape[0])


class Environment:
    """A pool of environments of one task, stepped by `send` then `receive`.

    `receive` returns `per_step` environments (all of them if 0). The next `send` must cover exactly these,
    except those given to `leave_out`.
    """

    def __init__(
        self,
        config: Config,
        spec: SegmentSpec,
        seeds: np.ndarray,
        max_episode_frames: int,
        threads: int = 0,
        per_step: int = 0,
        rendered: bool = False,
    ):
        """Starts the pool and its first episodes. `seeds`: int[E], one each; `rendered`: `screen` returns screens."""
        self.num_environments = len(seeds)
        self._rendered = rendered
        self._spec = spec
        with _no_precision_warning():
            self._pool = envpool.make(
                config.environment.task,
                env_type="gymnasium",
                num_envs=self.num_environments,
                batch_size=per_step or self.num_environments,
                num_threads=threads or min(self.num_environments, usable_cores()),
                seed=[int(seed) for seed in seeds],
                **_options(config, max_episode_frames),
                **({"render_mode": "rgb_array"} if rendered else {}),
            )
            _ = self._pool.observation_space  # EnvPool builds it at its first use, which would delay `receive`
        self._interface = interface_of(config, spec)
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
        shape = len(env_id), self._spec.frame_stack, *self._spec.frame_shape
        stack = flattened(observation, self._interface.parts).reshape(shape).astype(self._spec.frame_dtype, copy=False)
        reward = np.where(first, 0, reward).astype(np.float32)
        return Step(env_id, stack, reward, first, terminated, truncated, life_lost)

    def send(self, action: np.ndarray, env_id: np.ndarray) -> None:
        """Starts the next step of the environments `env_id`, as `receive` returned them; does not wait for it.

        `action`: as in the spec, [A, ...]. Raises ValueError for arguments with which EnvPool would crash or wait for
        ever.
        """
        environments = range(self.num_environments)
        if not (_are_actions(action, self._spec.action, env_id.size) and _all_in(env_id, environments)):
            spec = self._spec.action
            raise ValueError(
                f"actions {action} of environments {env_id}: one action in [{spec.low}, {spec.high}] is needed for each"
                f" environment in [0, {len(environments)}); EnvPool would crash on others"
            )
        if not self._waits[env_id].all() or np.count_nonzero(self._waits) != len(env_id) or _has_twins(env_id):
            raise ValueError(
                f"environments {env_id}: each of those that stepped last needs one action, and no other;"
                " EnvPool would crash, or wait for ever"
            )
        self._waits[env_id] = False
        self._pool.send(self._interface.scaled(action), env_id)

    def leave_out(self, env_id: np.ndarray) -> None:
        """Excludes environments that `receive` returned from the next `send`; they do nothing until `reset`."""
        self._waits[env_id] = False

    def screen(self) -> np.ndarray | None:
        """Returns the rendered screen of environment 0: uint8[height, width, 3]; None if the game has no screen."""
        if not self._rendered:
            return None
        try:
            return np.asarray(self._pool.render())[0]
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            return None

    def close(self) -> None:
        """Stops the pool's threads."""
        self._pool.close()


def has_stage(config: Config) -> bool:
    """Returns whether the task is one of DM control or Gym MuJoCo, whose episodes `stage` can show."""
    return family_of(config.environment.task) in ("mujoco.dmc", "mujoco.gym")


def has_screen(config: Config) -> bool:
    """Returns whether a game of the run's task can be recorded, see `Environment.screen`.

    False for all of MuJoCo: without a display and its libraries, EnvPool would end the process in `render`.
    """
    if _is_atari(config.environment.task) or family_of(config.environment.task).startswith("mujoco"):
        return _is_atari(config.environment.task)
    environment = Environment(config, segment_spec(config), np.zeros(1), 16, rendered=True)
    try:
        environment.receive()
        return environment.screen() is not None
    finally:
        environment.close()


class Episode(NamedTuple):
    """A finished full game, over all its lives, with raw rewards."""

    env_id: int
    episode_return: float
    steps: int


class EpisodeTracker:
    """Adds up raw rewards of full games."""

    def __init__(self, num_environments: int):
        self._returns = np.zeros(num_environments, np.float64)
        self._steps = np.zeros(num_environments, np.int64)

    def add(self, step: Step) -> list[Episode]:
        """Returns the games that ended with this step."""
        self._returns[step.env_id] += step.reward
        self._steps[step.env_id] += ~step.first
        ended = step.env_id[step.terminated | step.truncated]
        episodes = [Episode(int(i), float(self._returns[i]), int(self._steps[i])) for i in ended]
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


def action_bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and upper bound of each element of an action: float64[A].

    -1 and 1 replace bounds beyond UNBOUNDED, which are no real bounds (those of LQR are 1e10).
    """
    is_bound = (space.low > -UNBOUNDED) & (space.high < UNBOUNDED)
    return np.where(is_bound, space.low, -1.0).astype(np.float64), np.where(is_bound, space.high, 1.0).astype(
        np.float64
    )


def _has_twins(env_id: np.ndarray) -> bool:
    return bool((np.bincount(env_id) > 1).any())


def _is_atari(task: str) -> bool:
    return family_of(task) == "atari"


def family_of(task: str) -> str:
    """Returns the part of EnvPool that a task is of, such as "atari", "classic_control" or "mujoco.dmc"."""
    module: str = envpool.registration.registry.specs[task][0]
    return module.removeprefix("envpool.")


def _options(config: Config, max_episode_frames: int) -> dict[str, Any]:
    environment = config.environment
    max_steps = max(1, max_episode_frames // environment.frame_skip)
    if not _is_atari(environment.task):
        own_limit = envpool.make_spec(environment.task).config.max_episode_steps
        return {"max_episode_steps": min(max_steps, own_limit)}
    return {
        "max_episode_steps": max_steps,
        "img_height": environment.frame_size,
        "img_width": environment.frame_size,
        "stack_num": environment.frame_stack,
        "frame_skip": environment.frame_skip,
        "noop_max": environment.noop_max,
        "use_fire_reset": environment.fire_reset,
        "repeat_action_probability": environment.repeat_action_probability,
    }


@contextlib.contextmanager
def _no_precision_warning() -> Iterator[None]:
    """Silences gymnasium's warning that CartPole's bounds lose precision in float32: they are never used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        yield
