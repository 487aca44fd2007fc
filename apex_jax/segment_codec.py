"""Encodes segments as bytes and decodes them: pure functions, which check everything they decode.

The body of a segment holds the columns of `SegmentSpec.columns`, one after another, little-endian, and then its
observations as one zstd frame: each part of all slots, one after another. Columns can be read without decompressing
the observations; a replay server decompresses none.
"""

from __future__ import annotations

import functools
import math
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np
import zstandard

from apex_jax.config import Config
from apex_jax.types import (
    MASK,
    MAX_SEGMENT_BYTES,
    MAX_STREAMED_SEGMENTS,
    ActionSpec,
    Columns,
    Observation,
    Segment,
    SegmentRecord,
    SegmentSpec,
    joined,
    map_parts,
    zero_columns,
)

Bytes: TypeAlias = bytes | bytearray | memoryview

LARGEST_REWARD = 1e9  # limit of unclipped rewards, so that no float32 in an update overflows
LARGEST_OBSERVATION = 1e8  # limit in float frames for the same reason: gradients scale with them, and are squared
LARGEST_SQUARED = 1e16  # limit of those that are normalized, whose squares are added up in float32
OVERESTIMATION = 1e3  # a network that learns may overestimate the largest possible value by up to this factor
LONGEST_HORIZON_STEPS = 1e5  # a value sums rewards over at most this many steps, even if the discount is 1
HEADER_BYTES = 18  # of a zstd frame
FLOAT32, INT32 = np.dtype("<f4"), np.dtype("<i4")


class _Field(NamedTuple):
    """The position of a column in the body of a segment, or of a part in its uncompressed observations."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # offset in bytes


class _Layout(NamedTuple):
    """The layout of the body of a segment: the columns, then the observations."""

    fields: tuple[_Field, ...]
    columns_bytes: int
    parts: tuple[_Field, ...]
    parts_bytes: int  # uncompressed
    max_bytes: int  # of a whole body


@functools.lru_cache(maxsize=16)
def layout_of(spec: SegmentSpec) -> _Layout:
    """Returns the layout of a segment's body. Call it once per segment: a lookup takes 2 us."""
    fields, columns_bytes = _in_a_row((name, dtype, (spec.slots, *shape)) for name, dtype, shape in spec.columns)
    parts, parts_bytes = _in_a_row((name, part.dtype, (spec.slots, *part.shape)) for name, part in spec.parts.items())
    noise_bytes = parts_bytes + parts_bytes // 256 + HEADER_BYTES  # zstd stores incompressible frames raw
    return _Layout(fields, columns_bytes, parts, parts_bytes, columns_bytes + noise_bytes)


def _in_a_row(arrays: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[tuple[_Field, ...], int]:
    """Returns the positions of arrays (name, dtype, shape) that follow each other, and their bytes in all."""
    fields: list[_Field] = []
    end = 0
    for name, dtype_name, shape in arrays:
        dtype = np.dtype(dtype_name).newbyteorder("<")
        fields.append(_Field(name, dtype, shape, end))
        end += dtype.itemsize * math.prod(shape)
    return tuple(fields), end


class ValueLimits(NamedTuple):
    """The largest magnitudes that a segment of a run may hold."""

    n_step_return: float
    priority: float
    discount: float
    observation: float = LARGEST_SQUARED  # in float frames


NO_LIMITS = ValueLimits(math.inf, math.inf, 1.0)


def value_limits(config: Config) -> ValueLimits:
    """Returns the limits implied by rewards, n and discount, with some tolerance; larger values may end the run.

    |return| <= r * sum_{j<n} gamma^j for rewards up to r. A priority is a |TD error|, at most a return plus two values.
    A value is at most r / (1 - gamma), times OVERESTIMATION. If rewards are not clipped, r is LARGEST_REWARD.
    The priorities of items of a program of the user's own have no limit.
    """
    if config.replay.columns:
        return NO_LIMITS._replace(observation=LARGEST_OBSERVATION)
    gamma, reward = config.algorithm.discount, config.environment.reward_clip or LARGEST_REWARD
    largest_return = reward * sum(gamma**step for step in range(config.algorithm.n_step)) * (1 + 1e-3)
    largest_value = reward / max(1 - gamma, 1 / LONGEST_HORIZON_STEPS)
    largest_priority = largest_return + 2 * OVERESTIMATION * largest_value
    observation = LARGEST_SQUARED if config.network.normalize_observations else LARGEST_OBSERVATION
    return ValueLimits(largest_return, largest_priority, gamma * (1 + 1e-6), observation)


class _Zstd(threading.local):
    """The compressor and decompressor of a thread: they hold working memory, and are not thread-safe."""

    def __init__(self) -> None:
        # Measured with 64 frames of 84 x 84 of random play in Pong, Seaquest, MsPacman: 46, 119, 145 B per transition;
        # 110 to 160 us to compress, 50 us to decompress. zstd itself finds repetitions between frames: if each frame
        # is XORed with the previous one, it takes 52, 129, 153 B (LZ4: 104, 198, 218 B). Levels -1 and 3 save nothing;
        # level 5 saves 6 %, in 600 us.
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


class CorruptSegment(ValueError):
    """The bytes are not a segment of the spec; `reason` is one of REASONS, by which errors are counted."""

    REASONS = (
        "bad_length",  # too short for the columns and a pixel, or longer than a body can be
        "bad_priority",  # not finite, negative, or beyond what rewards, n and discount allow
        "bad_return",  # not finite, or beyond what rewards, n and discount allow
        "bad_discount",  # outside [0, 1], or above the discount of one step
        "bad_action",  # outside the bounds of the environment's actions
        "no_transition",  # no priority above 0
        "bad_start",  # a transition whose observation or bootstrap observation may lie outside the segment
        "bad_bootstrap",  # a bootstrap offset outside 1..n
        "bad_frames",  # not a zstd frame of the right size, floats that are NaN or beyond the limit, or no mask
    )

    def __init__(self, reason: str) -> None:
        assert reason in self.REASONS, reason
        super().__init__(reason)
        self.reason = reason


def encode_segment(segment: Segment, spec: SegmentSpec) -> bytes:
    """Returns the body of a segment; `decode_segment` accepts every body returned.

    Raises ValueError with the name of an array whose shape or dtype is not the spec's, and CorruptSegment (a ValueError
    too) for values that the decoder would reject, such as a segment in which no transition starts.
    """
    layout, frames = layout_of(spec), segment.frames
    parts = frames if len(layout.parts) > 1 else {layout.parts[0].name: frames}
    for fields, given in ((layout.parts, parts), (layout.fields, segment.columns)):
        for field in fields:
            _check_layout(field.name, given[field.name], field.shape, field.dtype)
    map_parts(lambda part: _check_numbers(part, NO_LIMITS.observation), frames)
    _check_mask(parts)
    arrays = [np.ascontiguousarray(parts[field.name]).data for field in layout.parts]
    pixels = _zstd.compressor.compress(arrays[0] if len(arrays) == 1 else b"".join(arrays))
    body = b"".join([*(segment.columns[field.name].tobytes() for field in layout.fields), pixels])
    decode_columns(body, spec)
    return body


def encode_record(segment: Segment, spec: SegmentSpec, peer_id: int, sequence: int, produced: int) -> SegmentRecord:
    """Returns a segment as it is sent and stored; the numbers: see `SegmentRecord`. Raises like `encode_segment`."""
    body = encode_segment(segment, spec)
    transitions = int(np.count_nonzero(segment.columns["priority"]))
    return SegmentRecord(peer_id, sequence, produced, transitions, body, zlib.crc32(body))


def decode_segment(body: Bytes, spec: SegmentSpec) -> Segment:
    """Returns the segment that `encode_segment` encoded, bit for bit; raises CorruptSegment."""
    return Segment(frames=decode_frames(body, spec), columns=decode_columns(body, spec))


def decode_columns(body: Bytes, spec: SegmentSpec, limits: ValueLimits = NO_LIMITS) -> Columns:
    """Returns the columns as read-only views of `body`, every value checked; raises CorruptSegment."""
    layout, slots = layout_of(spec), spec.slots
    data = _check_length(body, layout)
    columns = {field.name: np.ndarray(field.shape, field.dtype, data, field.start) for field in layout.fields}
    floats = np.ndarray((3, slots), FLOAT32, data)  # priority, n_step_return, discount
    # The server runs this for each incoming segment, hence few NumPy calls: 14 us in all. A NaN in a row makes both its
    # minimum and its maximum NaN, and every comparison with NaN is false.
    lowest, highest = floats.min(axis=1).tolist(), floats.max(axis=1).tolist()
    if not (lowest[0] >= 0 and highest[0] < math.inf and highest[0] <= limits.priority):
        raise CorruptSegment("bad_priority")
    largest = limits.n_step_return
    if not (lowest[1] > -math.inf and highest[1] < math.inf and lowest[1] >= -largest and highest[1] <= largest):
        raise CorruptSegment("bad_return")
    if not (lowest[2] >= 0 and highest[2] <= limits.discount):
        raise CorruptSegment("bad_discount")
    if not _are_allowed(columns["action"], spec.action):
        raise CorruptSegment("bad_action")
    starts = columns["priority"].nonzero()[0]
    if not starts.size:
        raise CorruptSegment("no_transition")
    if starts[0] < spec.frame_stack - 1 or starts[-1] >= slots - spec.n_step:
        raise CorruptSegment("bad_start")
    offsets = columns["bootstrap_offset"][starts]
    if offsets.min() < 1 or offsets.max() > spec.n_step:
        raise CorruptSegment("bad_bootstrap")
    return columns


def decode_frames(body: Bytes, spec: SegmentSpec, largest: float = NO_LIMITS.observation) -> Observation:
    """Returns the frames, vectors and masks `[L, *O]`, read-only; raises CorruptSegment."""
    layout = layout_of(spec)
    block = _check_length(body, layout)[layout.columns_bytes :]
    try:
        if zstandard.get_frame_parameters(block).content_size != layout.parts_bytes:  # before it is allocated
            raise CorruptSegment("bad_frames")
        pixels = _zstd.decompressor.decompress(block, allow_extra_data=False)
    except zstandard.ZstdError:
        raise CorruptSegment("bad_frames") from None
    parts = {field.name: np.ndarray(field.shape, field.dtype, pixels, field.start) for field in layout.parts}
    for part in parts.values():
        _check_numbers(part, largest)
    _check_mask(parts)
    return joined(parts)


def decode_segments(
    bodies: Sequence[Bytes], spec: SegmentSpec, limits: ValueLimits = NO_LIMITS
) -> tuple[Observation, Columns, dict[int, str]]:
    """Returns the frames, vectors and masks `[N, L, *O]` and columns `[N, L, ...]` of N segments; and of each corrupt
    one, whose values are all 0, the reason by its number.
    """
    frames = spec.zero_frames(len(bodies), spec.slots)
    columns = {name: np.stack([column] * len(bodies)) for name, column in zero_columns(spec).items()}
    corrupt: dict[int, str] = {}
    for number, body in enumerate(bodies):
        try:
            decoded = decode_columns(body, spec, limits)
            whole = decode_frames(body, spec, limits.observation)
        except CorruptSegment as error:
            corrupt[number] = error.reason
            continue
        map_parts(np.copyto, map_parts(itemgetter(number), frames), whole)
        for name, column in decoded.items():
            columns[name][number] = column
    return frames, columns, corrupt


def max_body_bytes(spec: SegmentSpec) -> int:
    """Returns the length of the longest body of a segment."""
    return layout_of(spec).max_bytes


def max_slots(spec: SegmentSpec) -> int:
    """Returns the most slots of a segment whose longest body fits in a message."""
    block = 256  # with this many slots, `max_body_bytes` is exact
    return (MAX_SEGMENT_BYTES - HEADER_BYTES) * block // (max_body_bytes(spec._replace(slots=block)) - HEADER_BYTES)


def max_streamed_bytes(spec: SegmentSpec) -> int:
    """Returns the length of the longest message that carries segments to the learner."""
    return min(MAX_STREAMED_SEGMENTS * max_body_bytes(spec), MAX_SEGMENT_BYTES)


def _check_length(body: Bytes, layout: _Layout) -> memoryview:
    data = memoryview(body).toreadonly()
    if not layout.columns_bytes < data.nbytes <= layout.max_bytes:
        raise CorruptSegment("bad_length")
    return data


def _are_allowed(action: np.ndarray, spec: ActionSpec) -> bool:
    if action.dtype == INT32 and spec.low == 0:  # as uint32, negative numbers are large: one check suffices
        return bool(action.view("<u4").max() <= spec.high)
    return bool(action.min() >= spec.low and action.max() <= spec.high)


def _check_numbers(part: np.ndarray, largest: float) -> None:
    if part.dtype != np.uint8 and not np.abs(part).max(initial=0.0) <= largest:
        raise CorruptSegment("bad_frames")


def _check_mask(parts: Mapping[str, np.ndarray]) -> None:
    if MASK in parts and parts[MASK].max() > 1:
        raise CorruptSegment("bad_frames")


def _check_layout(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, but the segment spec says {dtype}{list(shape)}")
