"""Tasks of EnvPool: their observations and actions, and pools of their environments."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import logger

from apex_jax.config import Config, EnvironmentConfig
from apex_jax.environments.envpool_package import envpool
from apex_jax.environments.task import action_of, environment_spec
from apex_jax.host.errors import UsageError, first_line
from apex_jax.host.machine import usable_cores
from apex_jax.types import EnvironmentSpec, Part

logger.min_level = logger.ERROR  # Gymnasium warns of bounds that lose precision in float32: they are never used


def describe(config: Config) -> EnvironmentSpec:
    """Describes the run's task. Raises UsageError if EnvPool lacks it, or if no agent here can learn it."""
    environment, known = config.environment, envpool.list_all_envs()
    task = environment.task
    if task not in known:
        near = [name for name in known if name.lower() in (task.lower(), f"{task}-v5".lower())]
        near = near or difflib.get_close_matches(task, known, 3) or difflib.get_close_matches(f"{task}-v5", known, 3)
        raise UsageError(
            f"environment.task={task}: EnvPool has no such task; did you mean {', '.join(near) or 'Pong-v5'}?"
        )
    try:
        spec = envpool.make_spec(task, **_options(environment, environment.max_episode_frames))
    except (ImportError, RuntimeError) as error:  # the game needs packages that are not installed
        what = f"EnvPool cannot make it here ({first_line(error)})"
        raise UsageError(f"environment.task={task}: {what}; choose another") from None
    observation, action = spec.gymnasium_observation_space, spec.gymnasium_action_space
    if spec.config.max_num_players > 1:
        raise UsageError(f"environment.task={task}: a game for several players; choose a task for one")
    is_atari, is_pixels, actions = environment.is_atari, observation.dtype == np.uint8, action_of(task, action)
    if not is_atari and environment.frame_skip != 1:
        fix = "set environment.frame_skip=1 environment.frame_stack=1, or leave them and --config out"
        raise UsageError(f"{task} has no frames to skip: {fix}")
    if is_pixels and not is_atari:
        raise UsageError(f"environment.task={task}: this agent plays no pixel games but Atari's; choose one of those")
    names = parts_of(task, spec)
    if names is not None and not set(names) <= set(getattr(observation, "spaces", ())):
        raise UsageError(f"environment.task={task}: its observations are not plain arrays; choose another task")
    if is_pixels:
        return environment_spec(config, observation.shape[1:], 0, actions, None)
    leaves = [(observation, ())] if names is None else [(observation[name], (name,)) for name in names]
    parts = tuple(Part(path, tuple(map(int, leaf.shape))) for leaf, path in leaves)
    return environment_spec(config, (), sum(math.prod(part.shape) for part in parts), actions, parts)


def make_pool(
    environment: EnvironmentConfig,
    seeds: np.ndarray,
    max_episode_frames: int,
    threads: int,
    per_step: int,
    rendered: bool,
) -> Any:
    """Returns a pool of EnvPool; arguments as of `VectorEnvironment`."""
    pool = envpool.make(
        environment.task,
        env_type="gymnasium",
        num_envs=len(seeds),
        batch_size=per_step or len(seeds),
        num_threads=threads or min(len(seeds), usable_cores()),
        seed=[int(seed) for seed in seeds],
        **_options(environment, max_episode_frames),
        **({"render_mode": "rgb_array"} if rendered else {}),
    )
    _ = pool.observation_space  # EnvPool builds it at its first use, which would delay `recv`
    return pool


def family_of(task: str) -> str:
    """Returns the part of EnvPool that a task is of, such as "atari", "classic_control" or "mujoco.dmc"."""
    module: str = envpool.registration.registry.specs[task][0]
    return module.removeprefix("envpool.")


def _options(environment: EnvironmentConfig, max_episode_frames: int) -> dict[str, Any]:
    max_steps = max(1, max_episode_frames // environment.frame_skip)
    if not environment.is_atari:
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


# Observations of several named parts, such as those of DM control, as one vector in EnvPool's order -----------------


NOT_OBSERVED: dict[str, tuple[str, ...]] = {
    r"Dog(Run|Stand|Trot|Walk)": ("ball_state", "target_position"),
    r"FingerSpin": ("target_position", "dist_to_target"),
    r"FishUpright": ("target",),
    r"Humanoid(Run|Stand|Walk)": ("position",),
    r"HumanoidRunPureState": ("joint_angles", "head_height", "extremities", "torso_vertical", "com_velocity"),
    r"Quadruped(Run|Walk)": ("rangefinder", "ball_state", "target_position", "origin"),
    r"QuadrupedEscape": ("ball_state", "target_position"),
    r"QuadrupedFetch": ("origin", "rangefinder"),
}
"""Parts that EnvPool returns but DM control lacks, by task: most are constant, some reveal the goal."""


def parts_of(task: str, spec: Any) -> tuple[str, ...] | None:
    """Returns the names of the parts that make an observation, in order; None if it is one array.

    `spec`: EnvPool's, of `envpool.make_spec`.
    """
    names = [name.removeprefix("obs:") for name in spec._state_keys if name.startswith("obs:")]
    left_out = [
        part for pattern, parts in NOT_OBSERVED.items() if re.fullmatch(f"{pattern}-v1", task) for part in parts
    ]
    return tuple(name for name in names if name not in left_out) or None


def flattened(observation: Any, parts: Iterable[str] | None) -> Any:
    """Returns the parts of N observations as float32[N, D]; parts None: returns the observations unchanged."""
    if parts is None:
        return observation
    arrays = [observation[part] for part in parts]
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1, dtype=np.float32)
