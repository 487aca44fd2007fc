"""Joins observations of several named parts, such as those of DM control, to one vector in EnvPool's order.

EnvPool's order is that of DM control, except in FishSwim, where EnvPool has the velocity before the target. Sorting by
name, as `gymnasium.spaces.Dict` and JAX do, would give another vector than DM control's own flat observation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

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


def size_of(space: Any, parts: tuple[str, ...] | None) -> int:
    """Returns the number of elements D of an observation; `space`: EnvPool's Gymnasium space of it."""
    return sum(math.prod(space[part].shape) for part in parts) if parts else math.prod(space.shape)


def flattened(observation: Any, parts: Iterable[str] | None) -> np.ndarray:
    """Returns the parts of N observations as float32[N, D]; one array, parts None, is returned unchanged."""
    if parts is None:
        return np.asarray(observation)
    arrays = [observation[part] for part in parts]
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1, dtype=np.float32)
