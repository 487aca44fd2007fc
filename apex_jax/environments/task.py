"""The observations and actions of a task, of EnvPool or of Gymnasium."""

from __future__ import annotations

import math
import textwrap
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from apex_jax.host.errors import UsageError
from apex_jax.types import ActionSpec, ImageSpec, Part

UNBOUNDED = 1e6  # of an element of an action, see `action_bounds`
MOST_COMBINATIONS = 256  # of an action of several discrete parts; each is an output of the network


class Description(NamedTuple):
    """A task's observations and actions."""

    frame_shape: tuple[int, ...]  # of one frame: (height, width) or (height, width, colours), or (D,) of a vector
    frame_dtype: str  # "uint8" of pixels, "float32" of a vector
    action: Any  # Gymnasium's space
    parts: tuple[Part, ...] | None  # of an observation that becomes a vector, in order; None: pixels
    frames_per_second: float | None = None  # Gymnasium: of a video; None if there can be no video
    image: ImageSpec | None = None  # Gymnasium: how images become frames
    reading: str = ""  # Gymnasium: one line that describes how observations are read
    is_masked: bool = False  # Gymnasium: see `ActionSpec`
    caution: str = ""  # Gymnasium: a warning about how observations are read


def action_spec(task: str, space: Any) -> ActionSpec:
    """Returns the spec of the actions in a space of Gymnasium. Raises UsageError if no agent has such actions."""
    if isinstance(space, Discrete):
        return ActionSpec.discrete(int(space.n))
    if isinstance(space, MultiDiscrete) and task.startswith("gymnasium:"):
        if (count := math.prod(np.ravel(space.nvec).tolist())) > MOST_COMBINATIONS:
            what = f"its actions, {one_line(space)}, have {count:,} combinations, must be at most {MOST_COMBINATIONS}"
            raise UsageError(f"environment.task={task}: {what}; leave some out in a gymnasium.ActionWrapper")
        return ActionSpec.discrete(count)
    if space.dtype is None or space.dtype.kind != "f" or len(space.shape) != 1:
        fix = "choose a task with discrete actions, such as Pong-v5, or with a vector of numbers, such as WalkerWalk-v1"
        if task.startswith("gymnasium:"):
            fix = "wrap it in gymnasium.wrappers.TransformAction, with a Discrete space or a Box of one axis of floats"
        raise UsageError(f"environment.task={task}: no algorithm here has its actions, {one_line(space)}; {fix}")
    return ActionSpec.continuous(space.shape[0])


def check_bounds(task: str, space: Any) -> None:
    """Raises UsageError if an element of an action has an open bound: there is no range to scale actions to."""
    if isinstance(space, Box) and (np.abs(np.array([space.low, space.high], np.float64)) > UNBOUNDED).any():
        what = f"its actions, {one_line(space)}, have an open bound (one beyond {UNBOUNDED:g} counts as open)"
        fix = "wrap it in gymnasium.wrappers.TransformAction with a Box of finite bounds, and leave ClipAction out"
        raise UsageError(f"environment.task={task}: {what}; {fix}, which opens them")


def one_line(space: Any) -> str:
    """Returns the text of a space without the line breaks of its arrays, and not too long for an error or a log."""
    return textwrap.shorten(str(space), 200, placeholder=" ...")


def action_bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and upper bound of each element of an action: float64[A].

    -1 and 1 replace bounds beyond UNBOUNDED, which are no real bounds (those of LQR are 1e10).
    """
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    is_bound = (low > -UNBOUNDED) & (high < UNBOUNDED)
    return np.where(is_bound, low, -1.0), np.where(is_bound, high, 1.0)
