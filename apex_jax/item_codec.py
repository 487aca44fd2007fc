"""Items of a program of the user's own <-> segments: pure functions.

An item is one row of columns of fixed shapes and dtypes, declared in `replay.columns`. Its bytes take the place of a
frame, so that replay server, journal and wire treat a segment of items like any other. The last slot of a segment stays
empty, because the replay expects a frame behind each transition.
"""

from __future__ import annotations

import math
import re

import numpy as np

from apex_jax.config import Config
from apex_jax.host.errors import UsageError, short_repr
from apex_jax.segment_codec import max_slots
from apex_jax.types import MAX_SEGMENT_BYTES, ActionSpec, Segment, SegmentSpec, zero_columns

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
MAX_TEXT_BYTES = 900  # of replay.columns, which is part of each hello
_COLUMN = re.compile(r"([A-Za-z]\w*):([a-z0-9]+)(?:\[([0-9]+(?:,[0-9]+)*)\])?", re.ASCII)


def item_dtype(columns: str) -> np.dtype:
    """Returns the structured dtype, packed and little-endian, of `replay.columns`. Raises UsageError."""
    text = "".join(columns.split())
    if not re.fullmatch(f"{_COLUMN.pattern}(?:,{_COLUMN.pattern})*", text, re.ASCII) or len(text) > MAX_TEXT_BYTES:
        form = "must be NAME:DTYPE or NAME:DTYPE[SHAPE] of each column, as in tokens:int32[512], reward:float32"
        raise _error(columns, f"{form}, with at most {MAX_TEXT_BYTES} characters")
    fields: list[tuple[str, str, tuple[int, ...]]] = []
    item_bytes = 0
    for name, dtype, sizes in _COLUMN.findall(text):
        if dtype not in DTYPES:
            raise _error(columns, f"{name} is {dtype}, must be one of {', '.join(DTYPES)}")
        if any(name == field[0] for field in fields):
            raise _error(columns, f"{name} is given twice; keep one")
        shape = tuple(int(size) for size in sizes.split(",") if size)
        item_bytes += math.prod(shape) * np.dtype(dtype).itemsize
        if not 0 < item_bytes <= MAX_SEGMENT_BYTES or 0 in shape:
            what = f"{name} has the shape {list(shape)}, but an item must have 1 to {MAX_SEGMENT_BYTES} bytes"
            raise _error(columns, what)
        fields.append((name, np.dtype(dtype).newbyteorder("<").str, shape))
    return np.dtype(fields)


def item_spec(config: Config) -> SegmentSpec:
    """Returns the spec of segments whose frames are items.

    Raises UsageError if `replay.columns` is malformed, or if a segment of its items exceeds the size of a message.
    """
    slots, item_bytes = config.actor.segment_slots, item_dtype(config.replay.columns).itemsize
    spec = SegmentSpec((item_bytes,), "uint8", 1, slots, 1, ActionSpec.discrete(1))
    if slots > (most := max_slots(spec)):
        with_items = f"with items of {item_bytes} bytes, because a message has at most {MAX_SEGMENT_BYTES >> 20} MiB"
        fix = "lower it, or make items smaller"
        raise UsageError(f"actor.segment_slots={slots}: must be at most {most} {with_items}; {fix}")
    return spec


def segment_of(items: np.ndarray, priorities: np.ndarray, spec: SegmentSpec) -> Segment:
    """Returns a segment of items [N] of `item_dtype`, with priorities float32[N]; N is 1 to `spec.max_transitions`."""
    count = len(items)
    assert 0 < count <= spec.max_transitions, count
    frames, columns = np.zeros((spec.slots, *spec.frame_shape), np.uint8), zero_columns(spec)
    frames[:count] = items.view(np.uint8).reshape(count, -1)
    columns["priority"][:count] = priorities
    columns["bootstrap_offset"][:count] = 1
    return Segment(frames, columns)


def columns_of(frames: np.ndarray, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Returns the columns [B, ...] by name of items as bytes, uint8[B, dtype.itemsize], in arrays of their own."""
    items = np.ascontiguousarray(frames).view(dtype)[:, 0]
    assert dtype.names is not None
    return {name: items[name].copy() for name in dtype.names}


def _error(columns: str, what: str) -> UsageError:
    return UsageError(f"replay.columns={short_repr(columns)}: {what}")
