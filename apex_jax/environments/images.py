"""Which observations of Gymnasium are images, and which of their axes are height and width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from apex_jax.environments.task import Leaf, one_line
from apex_jax.host.errors import UsageError
from apex_jax.types import ImageSpec, frame_shape_of

KEY = "environment.observation_layout"
USUAL_BOUNDS = ((0, 1), (0, 255))
LEAST_SIDE = 16  # of images that are not uint8; smaller arrays are more often tables


def image_specs(task: str, leaves: Sequence[Leaf], layout: str = "auto") -> tuple[ImageSpec, ...]:
    """Returns the parts of an observation that are read as images; the others become one vector.

    `leaves`: of its space. `layout`: `environment.observation_layout`, of every `Box` with as many axes. Of several
    images, those count that have the sides of the largest one. Raises UsageError if there is no image of such a layout.
    """
    if layout == "vector" or not leaves:
        return ()
    if layout == "auto":
        looks = _looks_like_images if leaves[0][0] == () else _looks_like_large_images
        found = [(path, space, _layout(space.shape)) for path, space in leaves if looks(space)]
    else:
        boxes = [leaf for leaf in leaves if isinstance(leaf[1], spaces.Box)]
        found = [(path, space, layout) for path, space in boxes if len(space.shape) == len(layout)]
        if not found:
            returned = ", ".join(one_line(space) for _, space in leaves)
            raise UsageError(f"{KEY}={layout}: environment.task={task} returns {returned}; set {KEY}=auto or vector")
    sides = [tuple(space.shape[axes.index(side)] for side in "HW") for _, space, axes in found]
    largest = max(sides, default=(), key=math.prod)
    return tuple(_image_spec(task, *each) for each, size in zip(found, sides, strict=True) if size == largest)


def _image_spec(task: str, path: tuple[str | int, ...], space: Any, layout: str) -> ImageSpec:
    low, high = float(space.low.min()), float(space.high.max())
    if not (np.isfinite([low, high]).all() and low < high):
        what = f"{KEY}={layout}: environment.task={task} returns {one_line(space)}, whose elements have no bounds"
        raise UsageError(f"{what}; wrap it in gymnasium.wrappers.TransformObservation with a Box from 0 to 1")
    return ImageSpec(space.shape, str(space.dtype), layout, low, high, path)


def reading(task: str, space: spaces.Space[Any], images: Sequence[ImageSpec], vector_size: int, mask_size: int) -> str:
    """Returns one line that describes how observations are read; see `task.observation_space`."""
    texts = []
    if images:
        height, width, channels = (*frame_shape_of(images), 1)[:3]
        names = ", ".join(_name(image.path) for image in images if image.path)
        layouts = " ".join(dict.fromkeys(image.layout for image in images))
        what = f"images of {height} x {width} pixels with {channels} channel{'s' * (channels != 1)}"
        texts.append(f"{what} ({', '.join(filter(None, (names, f'{KEY}={layouts}')))})")
    if vector_size or not images:
        texts.append(f"vectors of {vector_size:,} number{'s' * (vector_size != 1)}" + f" ({KEY}=vector)" * (not images))
    if mask_size:
        texts.append(f"{mask_size} numbers that say which actions are valid")
    return f"observations of {task}, {one_line(space)}, are read as {', and '.join(texts)}"


def caution(task: str, leaves: Sequence[Leaf], images: Sequence[ImageSpec]) -> str:
    """Returns a warning if an image becomes a part of the vector because its sides are not those of the others."""
    for path, space in leaves if images else ():
        if _looks_like_large_images(space) and all(path != image.path for image in images):
            what = f"{_name(path)}, {one_line(space)}, is read as {math.prod(space.shape or ()):,} numbers"
            fix = "resize them to one size in a gymnasium.ObservationWrapper"
            return f"environment.task={task}: its part {what}, not as an image; {fix}"
    return ""


def _name(path: tuple[str | int, ...]) -> str:
    return "/".join(map(str, path))


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


def _looks_like_large_images(space: spaces.Space[Any]) -> bool:
    shape = space.shape or ()
    return _looks_like_images(space) and min(shape[axis] for axis in _sides(shape)) >= LEAST_SIDE


def _layout(shape: tuple[int, ...]) -> str:
    height, width = _sides(shape)
    return "".join({height: "H", width: "W"}.get(axis, "C") for axis in range(len(shape)))


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the axes of height and width: of all neighbouring axes, those whose shorter one is longest.

    So channels and stacked frames, which are few, may come first or last.
    """
    height = max(range(len(shape) - 1), key=lambda axis: min(shape[axis : axis + 2]))
    return height, height + 1
