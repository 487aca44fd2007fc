"""The description of a task, of EnvPool, Gymnasium or JAX, from its spaces."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from apex_jax.config import Config
from apex_jax.config.rules import check_convolutions
from apex_jax.host.errors import RunError, UsageError
from apex_jax.segment_codec import max_slots
from apex_jax.types import (
    FRAMES,
    MASK,
    MAX_SEGMENT_BYTES,
    NUMBERS,
    ActionSpec,
    EnvironmentSpec,
    Part,
    SegmentSpec,
    joined,
)

UNBOUNDED = 1e6  # of an element of an action, see `action_bounds`
MOST_COMBINATIONS = 256  # of an action of several discrete parts; each is an output of the network


class BrokenEnvironment(RunError):
    """An environment raised an exception, ended its process, or returned a value outside its spaces."""


def environment_spec(
    config: Config,
    frame_shape: tuple[int, ...],
    vector_size: int,
    action: Action,
    parts: tuple[Part, ...] | None,
    is_masked: bool = False,
    **about: Any,
) -> EnvironmentSpec:
    """Returns the description of the run's task.

    `frame_shape`: (height, width) or (height, width, channels) of images, () if there are none; `vector_size`: numbers
    of the vector, 0 if there is none; `about`: other fields of `EnvironmentSpec`. Raises UsageError if a segment is too
    large for one message, or if the network's convolutions do not fit on the images.
    """
    environment, slots = config.environment, config.actor.segment_slots
    if frame_shape:
        check_convolutions(config.network, min(frame_shape[:2]))
    main = (frame_shape, "uint8") if frame_shape else ((vector_size,), "float32")
    of_agent, beside = action.spec._replace(is_masked=is_masked), vector_size if frame_shape else 0
    spec = SegmentSpec(*main, environment.frame_stack, slots, config.algorithm.n_step, of_agent, beside)
    if slots > (most := max_slots(spec)):
        why = f"a segment is sent in one message of at most {MAX_SEGMENT_BYTES >> 20} MiB"
        what = f"must be at most {most}, with environment.task={environment.task}, because {why}"
        raise UsageError(f"actor.segment_slots={slots}: {what}; lower it")
    return EnvironmentSpec(spec, parts, **{"low": None, "high": None, **action.fields, **about})


class Action(NamedTuple):
    """What a description says of a task's actions; plain data, where a space may be of a class of the user."""

    spec: ActionSpec
    fields: dict[str, Any]  # of `EnvironmentSpec`


def action_of(task: str, space: Any, is_bounded: bool = False) -> Action:
    """Describes the actions in a space of Gymnasium. Raises UsageError if no agent has such actions.

    `is_bounded`: refuses an open bound, too: there is no range to scale actions to.
    """
    if is_bounded:
        _check_bounds(task, space)
    spec, fields = action_spec(task, space), {"action_dtype": str(space.dtype)}
    if spec.dtype == "float32":
        low, high = (tuple(bound.tolist()) for bound in action_bounds(space))
        return Action(spec, {**fields, "low": low, "high": high})
    choices = choices_of(space)
    of_choices = {"first_action": choices.starts[0]} if isinstance(space, Discrete) else {"action_part": choices}
    return Action(spec, {**fields, **of_choices})


def choices_of(space: Any) -> Part:
    """Returns the choices of which a discrete action consists: one, or several whose combinations are the actions."""
    part = _part_of((), space)
    assert part is not None
    if isinstance(space, MultiBinary):
        size = math.prod(part.shape)
        return part._replace(counts=(2,) * size, starts=(0,) * size)
    return part


def action_space(described: EnvironmentSpec) -> Any:
    """Returns Gymnasium's space of the actions of a described environment."""
    dtype, part = np.dtype(described.action_dtype).type, described.action_part
    if part is not None:
        counts, starts = (np.reshape(numbers, part.shape) for numbers in (part.counts, part.starts))
        return MultiDiscrete(counts, dtype, start=starts)
    if described.low is not None:
        return Box(np.array(described.low), np.array(described.high), dtype=dtype)
    other: dict[str, Any] = {} if dtype is np.int64 else {"dtype": dtype}  # which Gymnasium 1.0 does not know
    return Discrete(described.spec.action.num_actions, start=described.first_action, **other)


def observation_space(frame_shape: tuple[int, ...], vector_size: int, mask_size: int) -> Any:
    """Returns Gymnasium's space of single frames, vectors and masks; see `environment_spec`."""
    parts: dict[str, Any] = {FRAMES: Box(0, 255, frame_shape, np.uint8)} if frame_shape else {}
    if vector_size or not frame_shape:
        parts[NUMBERS] = Box(-np.inf, np.inf, (vector_size,), np.float32)
    if mask_size:
        parts[MASK] = Box(0, 1, (mask_size,), np.uint8)
    return Dict(parts) if len(parts) > 1 else joined(parts)


Leaf: TypeAlias = tuple[tuple[str | int, ...], Any]  # path and space


def leaves_of(space: Any, path: tuple[str | int, ...] = ()) -> list[Leaf]:
    """Returns the spaces without parts in a space, with their paths, in the order of `gymnasium.spaces.flatten`."""
    if not isinstance(space, Dict | Tuple):
        return [(path, space)]
    members = space.items() if isinstance(space, Dict) else enumerate(space.spaces)
    return [leaf for key, member in members for leaf in leaves_of(member, (*path, key))]


def parts_of(leaves: Iterable[Leaf]) -> tuple[Part, ...] | None:
    """Returns the arrays of spaces without parts; None if one of them is a text."""
    parts = [_part_of(*leaf) for leaf in leaves]
    return None if None in parts else tuple(part for part in parts if part is not None)


def _part_of(path: tuple[str | int, ...], space: Any) -> Part | None:
    if isinstance(space, Box | MultiBinary):
        return Part(path, tuple(space.shape))
    if isinstance(space, Discrete | MultiDiscrete):
        counts = np.ravel(space.nvec if isinstance(space, MultiDiscrete) else space.n)
        return Part(path, tuple(space.shape or ()), tuple(counts.tolist()), tuple(np.ravel(space.start).tolist()))
    return None


def action_spec(task: str, space: Any) -> ActionSpec:
    """Returns the spec of the actions in a space of Gymnasium. Raises UsageError if no agent has such actions."""
    if isinstance(space, Discrete):
        return ActionSpec.discrete(int(space.n))
    if isinstance(space, MultiDiscrete | MultiBinary) and ":" in task:
        if (count := math.prod(choices_of(space).counts)) > MOST_COMBINATIONS:
            wrapper = "a gymnasium.ActionWrapper" if not task.startswith("jax:") else "an environment of your own"
            what = f"its actions, {one_line(space)}, have {count:,} combinations, must be at most {MOST_COMBINATIONS}"
            raise UsageError(f"environment.task={task}: {what}; leave some out in {wrapper}")
        return ActionSpec.discrete(count)
    if space.dtype is None or space.dtype.kind != "f" or len(space.shape) != 1:
        fix = "choose a task with discrete actions, such as Pong-v5, or with a vector of numbers, such as WalkerWalk-v1"
        if task.startswith("gymnasium:"):
            fix = "wrap it in gymnasium.wrappers.TransformAction, with a Discrete space or a Box of one axis of floats"
        raise UsageError(f"environment.task={task}: no algorithm here has its actions, {one_line(space)}; {fix}")
    return ActionSpec.continuous(space.shape[0])


def _check_bounds(task: str, space: Any) -> None:
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
