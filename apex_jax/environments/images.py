"""Which observations of Gymnasium are images, and which of their axes are height and width."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from apex_jax.environments.task import one_line
from apex_jax.host.errors import UsageError
from apex_jax.types import ImageSpec

KEY = "environment.observation_layout"
USUAL_BOUNDS = ((0, 1), (0, 255))
LEAST_SIDE = 16  # of images that are not uint8; smaller arrays are more often tables


def image_spec(task: str, space: spaces.Space[Any], layout: str = "auto") -> ImageSpec | None:
    """Returns how the observations of a space are read as images; None if they become vectors.

    `layout`: `environment.observation_layout`. Raises UsageError if the space has no such layout.
    """
    if layout == "vector" or (layout == "auto" and not _looks_like_images(space)):
        return None
    if not isinstance(space, spaces.Box) or not (layout == "auto" or len(layout) == len(space.shape)):
        raise UsageError(f"{KEY}={layout}: environment.task={task} returns {one_line(space)}; set {KEY}=auto or vector")
    low, high = float(space.low.min()), float(space.high.max())
    if not (np.isfinite([low, high]).all() and low < high):
        what = f"{KEY}={layout}: environment.task={task} returns {one_line(space)}, whose elements have no bounds"
        raise UsageError(f"{what}; wrap it in gymnasium.wrappers.TransformObservation with a Box from 0 to 1")
    return ImageSpec(space.shape, str(space.dtype), layout if layout != "auto" else _layout(space.shape), low, high)


def reading(task: str, space: spaces.Space[Any], image: ImageSpec | None, size: int) -> str:
    """Returns one line that describes how observations are read; `size`: the number of elements of a vector."""
    if image is None:
        return f"observations of {task}, {one_line(space)}, are read as vectors of {size:,} numbers ({KEY}=vector)"
    height, width, channels = (*image.frame_shape, 1)[:3]
    what = f"images of {height} x {width} pixels with {channels} channel{'s' * (channels != 1)}"
    return f"observations of {task}, {one_line(space)}, are read as {what} ({KEY}={image.layout})"


def caution(task: str, space: spaces.Space[Any], path: str = "") -> str:
    """Returns a warning if a part of nested observations, which become one vector, looks like an image; else empty.

    `path`: that leads to the space, such as ['arm'][0].
    """
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return ""
    members = list(space.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces))
    for key, part in members:
        shape = part.shape or ()
        if _looks_like_images(part) and min(shape[axis] for axis in _sides(shape)) >= LEAST_SIDE:
            what = f"its part {key}, {one_line(part)}, is read as {int(np.prod(shape)):,} numbers, not as an image"
            alone = f"TransformObservation(env, lambda x: x{path}[{key!r}], env.observation_space{path}[{key!r}])"
            return f"environment.task={task}: {what}; to learn from it alone: gymnasium.wrappers.{alone}"
    return next(filter(None, (caution(task, part, f"{path}[{key!r}]") for key, part in members)), "")


def picture(rendered: Any) -> np.ndarray | None:
    """Returns what an environment has rendered as uint8[height, width, 3]; None if it is no picture.

    Grey pictures, [height, width] or [height, width, 1], an alpha channel, and floats from 0 to 1 are converted.
    """
    frame = np.asarray(rendered)
    if frame.dtype.kind == "f" and frame.size and np.isfinite(frame).all() and 0 <= frame.min() <= frame.max() <= 1:
        frame = np.rint(frame * 255).astype(np.uint8)
    frame = frame[..., None] if frame.ndim == 2 else frame
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] not in (1, 3, 4):
        return None
    return np.broadcast_to(frame[..., :3], (*frame.shape[:2], 3))


def _looks_like_images(space: spaces.Space[Any]) -> bool:
    if not isinstance(space, spaces.Box) or len(space.shape) < 2:
        return False
    bounds, sides = (space.low.min(), space.high.max()), _sides(space.shape)
    return space.dtype == np.uint8 or (bounds in USUAL_BOUNDS and min(space.shape[i] for i in sides) >= LEAST_SIDE)


def _layout(shape: tuple[int, ...]) -> str:
    height, width = _sides(shape)
    return "".join({height: "H", width: "W"}.get(axis, "C") for axis in range(len(shape)))


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the axes of height and width: of all neighbouring axes, those whose shorter one is longest.

    So channels and stacked frames, which are few, may come first or last.
    """
    height = max(range(len(shape) - 1), key=lambda axis: min(shape[axis : axis + 2]))
    return height, height + 1
