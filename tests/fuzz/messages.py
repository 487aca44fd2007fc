"""The messages of an adversary: mutated real ones, well-formed nonsense, and noise."""

from __future__ import annotations

import functools
import os
import pickle
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import msgpack
import numpy as np

from apex_jax.segment_codec import encode_segment
from apex_jax.transport import wire
from apex_jax.transport.messages import StreamedSegments, WeightsBody
from apex_jax.types import Array, Buffer, Flag, Integer, Real, SegmentRecord, Text
from tests.rigs.links import SPEC, segment_of

Frames = list[bytes]
Mutation = Callable[["Fuzzer", Frames], Frames]

INTEGERS = (0, 1, -1, 2, 127, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = (0.0, -0.0, 1e-45, 1.0, -1.0, 3.4e38, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "\0", "x" * 70_000, "\udcff", "ünï", "../../etc/passwd", "%s%n", "a" * 1024)
OTHERS: tuple[Any, ...] = (None, True, False, [], [[]], {}, {"a": 1}, b"", b"\x80", [1, 2, 3], [2**62, 2**62])
NASTY: tuple[Any, ...] = (*INTEGERS, *NUMBERS, *TEXTS, *OTHERS)
BOMBS = (
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1 elements
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xdb\xff\xff\xff\xff",  # a text
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\x91" * 60_000,  # arrays in arrays
    b"\x81\x01" * 30_000,  # maps in maps
    b"\x9c\xa4apex\x01" + b"\xc1" * 20,  # the byte that msgpack never uses
)
CHECKSUMS = {  # number of a kind -> the place of its checksum in the header
    kind: 3 + message._fields.index("crc") for kind, message in enumerate(wire.MESSAGES) if "crc" in message._fields
}
BODIES = [encode_segment(segment_of(number), SPEC) for number in range(8)]


class Fuzzer:
    """Makes messages of some kinds and mutates them; deterministic for a seed."""

    def __init__(self, kinds: Sequence[type], seed: int, compatibility_key: str, marker: str = "") -> None:
        """`marker`: a path that exists once somebody has unpickled the message."""
        self.random = random.Random(seed)
        self._rng = np.random.default_rng(seed)
        self._compatibility_key = compatibility_key
        self.peer_ids = [self.random.getrandbits(63) for _ in range(6)]
        self.pickled = pickle.dumps(Unpickled(marker))
        self._pools = {kind: [self.message_of(kind) for _ in range(64)] for kind in kinds}
        self._frames = {kind: [_frames_of(message) for message in pool] for kind, pool in self._pools.items()}
        self._kinds = list(kinds)
        self._noise = self._rng.bytes(2**20)
        self._mutations = [mutation for mutation, weight in MUTATIONS for _ in range(weight)]

    def next(self) -> Frames:
        """Returns the frames of the next message."""
        kind = self.random.choice(self._kinds)
        if self.random.random() < 0.05:
            frames = _frames_of(self.message_of(kind))
        else:
            frames = list(self.random.choice(self._frames[kind]))
        for _ in range(self.random.choice((0, 1, 1, 1, 1, 2, 3))):
            frames = self.random.choice(self._mutations)(self, frames)
        return frames or [b""]

    def message_of(self, kind: Any) -> Any:
        """Returns a message whose every field fits its mark, with values from the ends of what fits."""
        sizes: dict[str, int] = {}
        message = kind(*(self._value(name, mark, sizes) for name, mark in _marks_of(kind)))
        if isinstance(message, SegmentRecord):
            body = self.random.choice(BODIES) if self.random.random() < 0.7 else self.damaged(BODIES[0])
            message = message._replace(body=body, crc=zlib.crc32(body))
        elif isinstance(message, StreamedSegments):
            count = len(message.ring_slots)
            bodies = [self.random.choice(BODIES) for _ in range(count)]
            lengths = np.array([len(body) for body in bodies], np.int32)
            message = message._replace(body_bytes=lengths, bodies=b"".join(bodies))
        elif isinstance(message, WeightsBody) and self.random.random() < 0.8:
            message = message._replace(crc=zlib.crc32(message.body))
        return message

    def noise(self, num_bytes: int) -> bytes:
        """Returns random bytes, at most 2^19 of them."""
        start = self.random.randrange(2**19)
        return self._noise[start : start + num_bytes]

    def place(self, frames: Frames) -> int:
        """Returns a place among frames, seldom that of the header where there are others: it hides what they do."""
        first = 1 if len(frames) > 1 and self.random.random() < 0.8 else 0
        return self.random.randrange(first, len(frames))

    def length(self) -> int:
        """Returns a small length, seldom a large one."""
        return (
            self.random.choice((0, 1, 2, 3, 4, 8, 16, 63, 64, 65, 200, 1000)) if self.random.random() < 0.99 else 2**17
        )

    def _value(self, name: str, mark: Any, sizes: dict[str, int]) -> Any:
        choice = self.random.choice
        if name == "peer_id":
            return choice(self.peer_ids)
        if name == "compatibility_key":
            return self._compatibility_key if self.random.random() < 0.9 else "another"
        if isinstance(mark, Integer):
            among = [value for value in INTEGERS if mark.low <= value <= mark.high]
            return choice([mark.low, mark.high, *among, self.random.randint(mark.low, min(mark.high, mark.low + 100))])
        if isinstance(mark, Real):
            return float(choice([mark.low, mark.high, (mark.low + mark.high) / 2]))
        if isinstance(mark, Flag):
            return choice((True, False))
        if isinstance(mark, Text):
            return choice(("", "reason", "ü" * (mark.max_bytes // 2)))
        if isinstance(mark, Buffer):
            return self._rng.bytes(choice((0, 1, 40, 40, 40, 1000)))
        assert isinstance(mark, Array)
        for letter in mark.axes:
            sizes.setdefault(letter, choice((0, 1, 1, 2, 16, 32)))
        return self._array(mark, [sizes[letter] for letter in mark.axes])

    def _array(self, mark: Array, shape: list[int]) -> np.ndarray:
        dtype = np.dtype(mark.dtype)
        if dtype.kind == "f":
            values = np.array([value for value in NUMBERS if not abs(value) > 1e38 or value in NUMBERS[-3:]], dtype)
            usual = self._rng.random(shape).astype(dtype)
        else:
            info = np.iinfo(dtype)
            values = np.array([info.min, info.max, 0, 1, 7, SPEC.slots, 64 * SPEC.slots - 1], dtype)
            usual = self._rng.integers(0, 64, shape).astype(dtype)
        nasty = self._rng.choice(values, shape)
        return np.where(self._rng.random(shape) < self.random.choice((0.0, 0.1, 1.0)), nasty, usual)

    def damaged(self, data: bytes) -> bytes:
        """Returns data with some bytes changed."""
        damaged = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 8))):
            damaged[self.random.randrange(len(damaged))] = self.random.randrange(256)
        return bytes(damaged)


class Unpickled:
    """Whoever unpickles this makes a directory."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


@functools.cache
def _marks_of(kind: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(name, hints[name].__metadata__[0]) for name in kind._fields]


def _frames_of(message: Any) -> Frames:
    return [bytes(frame) for frame in wire.encode(message)]


def _header(frames: Frames) -> list[Any]:
    try:
        header = msgpack.unpackb(frames[0], strict_map_key=False)
    except Exception:
        return ["apex", wire.PROTOCOL_VERSION, 0]
    return header if isinstance(header, list) and len(header) > 2 else ["apex", wire.PROTOCOL_VERSION, 0]


def _with_header(frames: Frames, header: list[Any]) -> Frames:
    return [msgpack.packb(header, unicode_errors="surrogatepass"), *frames[1:]]


# Mutations -------------------------------------------------------------------------------------------------------


def _flip_bytes(fuzzer: Fuzzer, frames: Frames) -> Frames:
    place = fuzzer.place(frames)
    frames[place] = fuzzer.damaged(frames[place]) if frames[place] else b"\0"
    return frames


def _flip_bytes_under_a_true_checksum(fuzzer: Fuzzer, frames: Frames) -> Frames:
    frames = _flip_bytes(fuzzer, frames)
    header = _header(frames)
    place = CHECKSUMS.get(header[2]) if isinstance(header[2], int) else None
    if place is not None and place < len(header):
        header[place] = zlib.crc32(frames[-1])
    return _with_header(frames, header)


def _change_length(fuzzer: Fuzzer, frames: Frames) -> Frames:
    place = fuzzer.place(frames)
    cut = frames[place][: fuzzer.random.randrange(len(frames[place]) + 1)]
    frames[place] = fuzzer.random.choice((cut, frames[place] + fuzzer.noise(fuzzer.length())))
    return frames


def _change_number_of_frames(fuzzer: Fuzzer, frames: Frames) -> Frames:
    place, choose = fuzzer.random.randrange(len(frames)), fuzzer.random.random()
    if choose < 0.4:
        del frames[place]
    elif choose < 0.98:
        noise = fuzzer.noise(fuzzer.length())
        frames.insert(place, fuzzer.random.choice((noise, fuzzer.pickled, frames[-1])))
    else:
        frames += [frames[-1]] * fuzzer.random.choice((2, 10, 300))
    return frames or [b""]


def _change_header(fuzzer: Fuzzer, frames: Frames) -> Frames:
    header, choose = _header(frames), fuzzer.random.random()
    place, value = fuzzer.random.randrange(len(header)), fuzzer.random.choice(NASTY)
    if choose < 0.15:
        header[2] = fuzzer.random.randrange(len(wire.MESSAGES))
    elif choose < 0.25:
        header.insert(place, value)
    elif choose < 0.35:
        del header[place]
    else:
        header[place] = value
    return _with_header(frames, header)


def _change_shape(fuzzer: Fuzzer, frames: Frames) -> Frames:
    header = _header(frames)
    if shapes := [i for i, item in enumerate(header) if isinstance(item, list) and item]:
        place = fuzzer.random.choice(shapes)
        shape = [fuzzer.random.choice((0, 1, 2, 16, 2**31, 2**32, 2**62, -1)) for _ in header[place]]
        header[place] = shape if fuzzer.random.random() < 0.8 else [*header[place], 1]
    return _with_header(frames, header)


def _replace_frame(fuzzer: Fuzzer, frames: Frames) -> Frames:
    """Fills a frame with a pickle, or with NaN, infinity, or the largest and the smallest number."""
    place = fuzzer.random.randrange(len(frames))
    word = fuzzer.random.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\xff\xff\xff\x7f", b"\x01\0\0\0"))
    filled = (word * (len(frames[place]) // 4 + 1))[: len(frames[place])]
    frames[place] = fuzzer.pickled if fuzzer.random.random() < 0.25 else filled
    return frames


def _bomb(fuzzer: Fuzzer, frames: Frames) -> Frames:
    return [fuzzer.random.choice(BOMBS), *frames[1:]]


def _noise(fuzzer: Fuzzer, frames: Frames) -> Frames:
    return [fuzzer.noise(fuzzer.length()) for _ in range(fuzzer.random.choice((1, 1, 2, 3, 5)))]


MUTATIONS: tuple[tuple[Mutation, int], ...] = (
    (_flip_bytes, 6),
    (_flip_bytes_under_a_true_checksum, 4),
    (_change_length, 5),
    (_change_number_of_frames, 5),
    (_change_header, 12),
    (_change_shape, 4),
    (_replace_frame, 4),
    (_bomb, 1),
    (_noise, 2),
)
