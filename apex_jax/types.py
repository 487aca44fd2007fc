"""Records that modules exchange, and limits of the sizes and counts in a run.

Axis legend, used in every shape of this project:

    B  transitions of a batch          K  batches drawn together
    E  environments of an actor        A  environments that stepped, or elements of an action
    F  frames per observation (stack)  L  frame slots of a segment
    C  segments that fit in the replay N  any number of elements
    *O shape of one frame: (height, width) of pixels, or (D,) of a vector observation

An observation has one or more parts: FRAMES, uint8 images; NUMBERS, a float32 vector; and MASK, 1 for each valid action
and 0 for the others. Observations of one part are an array [*N, F, *O]; those of several are a dict of such arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np

MAX_COUNT = 2**48  # of transitions, segments or actors; no sum overflows 64 bits, and the journal accepts every count
MAX_ENVIRONMENT_STEPS = 10**15  # of a run; multiplied by a frame skip, it still fits in 64 bits
MAX_SAMPLES_PER_INSERT = 1e9  # in a message; the ratio itself grows without limit while no actor sends segments
MAX_SEGMENT_BYTES = 2**25
MAX_STREAMED_SEGMENTS = 64  # in one message to the learner; fewer if they exceed a few megabytes
MAX_WEIGHTS_BYTES = 2**29
PEER_TIMEOUT_SECONDS = 10.0  # a peer that has sent nothing for this long is considered dead


# The marks of a message's fields, see `apex_jax.transport.messages`


class Integer(NamedTuple):
    """A whole number in [low, high]."""

    low: int = 0
    high: int = 2**63 - 1


class Real(NamedTuple):
    """A finite number in [low, high]."""

    low: float
    high: float


class Flag(NamedTuple):
    """True or False."""


class Text(NamedTuple):
    """Unicode text of at most `max_bytes` in UTF-8."""

    max_bytes: int


MAX_ARRAY_SIZE = 2**22  # elements, of at most 8 bytes


class Array(NamedTuple):
    """A little-endian array of at most `max_size` elements; `axes` has one letter per dimension."""

    dtype: str
    axes: str
    max_size: int = MAX_ARRAY_SIZE


class Buffer(NamedTuple):
    """At most `max_bytes` opaque bytes."""

    max_bytes: int


PeerId = Annotated[int, Integer()]
"""Random number drawn by a process at its start; a restarted process has another one."""


ACTION_MASK = "action_mask"  # key of an environment's observation, or of its `info`

FRAMES, NUMBERS, MASK = "frames", "numbers", "mask"

Observation: TypeAlias = Any
"""An array, or a dict of arrays by FRAMES, NUMBERS and MASK; see the head of this module."""


def named_parts(observation: Observation) -> dict[str, Any]:
    """Returns the parts of observations by name; a single array is of FRAMES if its dtype is uint8, else of NUMBERS."""
    if isinstance(observation, dict):
        return observation
    return {FRAMES if observation.dtype == np.uint8 else NUMBERS: observation}


def joined(parts: dict[str, Any]) -> Observation:
    """Returns observations of these parts: the inverse of `named_parts`."""
    return parts if len(parts) > 1 else next(iter(parts.values()))


def map_parts(function: Callable[..., Any], *observations: Observation) -> Any:
    """Returns `function` of each part of observations with the same parts: one result, or a dict of results."""
    first = observations[0]
    if not isinstance(first, dict):
        return function(*observations)
    return {name: function(*(each[name] for each in observations)) for name in first}


# Records


class ActionSpec(NamedTuple):
    """The actions that an environment accepts; each element is in [low, high]."""

    shape: tuple[int, ...]  # () if discrete
    dtype: str  # "int32" if discrete, "float32" if continuous
    low: float
    high: float
    is_masked: bool = False  # observations have a MASK of valid actions

    @classmethod
    def discrete(cls, num_actions: int) -> ActionSpec:
        """Returns the spec of the discrete actions 0, 1 ... num_actions - 1."""
        return cls((), "int32", 0, num_actions - 1)

    @classmethod
    def continuous(cls, size: int) -> ActionSpec:
        """Returns the spec of `size` numbers in [-1, 1], which the environment scales to its own bounds."""
        return cls((size,), "float32", -1, 1)

    @property
    def num_actions(self) -> int:
        """The number of discrete actions."""
        assert self.dtype == "int32", self
        return int(self.high) + 1


class Column(NamedTuple):
    """One value per slot of a segment: that of the transition that starts there; 0 if none does."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the value of one slot


class StackSpec(NamedTuple):
    """The newest `stack` values of one part of an observation: an array [stack, *shape]."""

    shape: tuple[int, ...]
    dtype: str
    stack: int


class SegmentSpec(NamedTuple):
    """Geometry of a segment; every role of a run agrees on it.

    A segment is a run of `slots` consecutive frames of one environment. The observation at slot f is the stack of
    frames f-F+1..f, so slots 0..F-2 start no transition; a transition that starts at f bootstraps at most n slots
    later, so the last n slots start none either. Consecutive segments overlap by `overlap` slots: each transition
    starts in exactly one segment, and each segment can be read without any other.
    """

    frame_shape: tuple[int, ...]
    frame_dtype: str  # "uint8" of images, "float32" of vectors
    frame_stack: int
    slots: int
    n_step: int
    action: ActionSpec
    numbers: int = 0  # of the vector beside images; 0: there is none

    @property
    def parts(self) -> dict[str, StackSpec]:
        """The parts of an observation by name, one at least."""
        main = FRAMES if self.has_images else NUMBERS
        parts = {main: StackSpec(self.frame_shape, self.frame_dtype, self.frame_stack)}
        if self.numbers:
            parts[NUMBERS] = StackSpec((self.numbers,), "float32", self.frame_stack)
        if self.action.is_masked:
            parts[MASK] = StackSpec((self.action.num_actions,), "uint8", 1)
        return parts

    @property
    def observation(self) -> Observation:
        """The parts of an observation as `StackSpec`: one, or a dict of several."""
        return joined(self.parts)

    @property
    def has_images(self) -> bool:
        """Whether frames are images."""
        return self.frame_dtype == "uint8"

    @property
    def vector_size(self) -> int:
        """Numbers of the vector of an observation; 0 if it has none."""
        return self.numbers if self.has_images else self.frame_shape[0]

    def zeros(self, *leading: int) -> Observation:
        """Returns observations of zeros, [*leading, F, *O]."""
        return map_parts(lambda part: np.zeros((*leading, part.stack, *part.shape), part.dtype), self.observation)

    def zero_frames(self, *leading: int) -> Observation:
        """Returns single frames, vectors and masks of zeros, [*leading, *O]."""
        return map_parts(lambda part: np.zeros((*leading, *part.shape), part.dtype), self.observation)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of an encoded segment, in order. The codec checks the first three as one block of float32."""
        return (
            Column("priority", "float32", ()),  # not yet raised to the exponent; 0 = no transition starts here
            Column("n_step_return", "float32", ()),  # sum of the (clipped) discounted rewards of k steps
            Column("discount", "float32", ()),  # gamma^k, or 0 if the episode terminated within those k steps
            Column("action", self.action.dtype, self.action.shape),
            Column("bootstrap_offset", "uint8", ()),  # k in 1..n: the bootstrap observation ends at slot f + k
        )

    @property
    def overlap(self) -> int:
        """Slots shared by consecutive segments of an environment."""
        return self.frame_stack - 1 + self.n_step

    @property
    def max_transitions(self) -> int:
        """Transitions that start in a segment in which no episode ends."""
        return self.slots - self.overlap

    def ring_segments(self, capacity_transitions: int) -> int:
        """Segments that a replay of this capacity holds; server and learner must agree on it."""
        return max(2, capacity_transitions // self.max_transitions)

    @property
    def frame_bytes(self) -> int:
        """Bytes of one uncompressed frame, with its numbers and mask."""
        return sum(math.prod(part.shape) * np.dtype(part.dtype).itemsize for part in self.parts.values())


class Part(NamedTuple):
    """An array in an observation, such as the `Box` at `observation["arm"][0]` of nested spaces of Gymnasium."""

    path: tuple[str | int, ...]  # keys and indices that lead to it; empty: the observation itself
    shape: tuple[int, ...]
    counts: tuple[int, ...] = ()  # of the values of each element, which is encoded one-hot; empty: numbers as they are
    starts: tuple[int, ...] = ()  # lowest value of each of these elements

    @property
    def name(self) -> str:
        """Its path as a text, such as arm/0."""
        return "/".join(map(str, self.path))

    def flattened(self, array: np.ndarray, batch: tuple[int, ...]) -> np.ndarray:
        """Returns arrays [*batch, *shape] as float32[*batch, D], as `gymnasium.spaces.flatten` encodes each.

        Raises ValueError for a value that is not among the counted ones.
        """
        rows = array.reshape(*batch, -1)
        if not self.counts:
            return rows.astype(np.float32)
        values, counts = rows.astype(np.int64) - np.array(self.starts), np.array(self.counts)
        if not ((values >= 0) & (values < counts)).all():
            raise ValueError(" ".join(filter(None, ("an observation of", self.name, str(array.tolist())[:80]))))
        places = counts.cumsum() - counts + values
        return (places[..., None] == np.arange(counts.sum())).any(axis=-2).astype(np.float32)


class ImageSpec(NamedTuple):
    """Images in an observation of Gymnasium or JAX, and how they become frames."""

    shape: tuple[int, ...]
    dtype: str
    layout: str  # one letter for each axis: H height, W width; C others, whose elements become channels
    low: float  # of the elements; becomes 0
    high: float  # becomes 255
    path: tuple[str | int, ...] = ()  # as of a `Part`

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """The shape of a frame: (height, width) or (height, width, channels)."""
        channels = [size for size, axis in zip(self.shape, self.layout, strict=True) if axis == "C"]
        sides = (self.shape[self.layout.index("H")], self.shape[self.layout.index("W")])
        return (*sides, math.prod(channels)) if channels else sides

    def frames(self, images: np.ndarray) -> np.ndarray:
        """Returns images [*N, *shape] as uint8[*N, *frame_shape]. Raises ValueError for elements beyond the bounds."""
        leading = images.ndim - len(self.shape)
        order = sorted(range(len(self.shape)), key=lambda axis: "HWC".index(self.layout[axis]))
        frames = images.transpose(*range(leading), *(leading + axis for axis in order))
        frames = frames.reshape(*images.shape[:leading], *self.frame_shape)
        if (self.dtype, self.low, self.high) == ("uint8", 0, 255):
            return frames
        levels = np.rint((frames.astype(np.float32) - self.low) * (255 / (self.high - self.low)))
        if not (levels.min() >= 0 and levels.max() <= 255):  # also for NaN
            found = f"{images.min():g} to {images.max():g}"
            raise ValueError(f"an observation of elements from {found}; expected {self.low:g} to {self.high:g}")
        return levels.astype(np.uint8)


def frame_shape_of(images: Sequence[ImageSpec]) -> tuple[int, ...]:
    """Returns the shape of a frame made of images of one size: theirs, or that of all their channels; () of none."""
    shapes = [image.frame_shape for image in images]
    if len(shapes) < 2:
        return shapes[0] if shapes else ()
    return (*shapes[0][:2], sum(math.prod(shape[2:]) for shape in shapes))


def frames_of(images: Sequence[ImageSpec], frames: Sequence[Any], numpy: Any = np) -> Any:
    """Returns the frames of several images, [*N, H, W] or [*N, H, W, C] each, as one: their channels side by side.

    `numpy`: or jax.numpy, of which the frames are.
    """
    if len(frames) == 1:
        return frames[0]
    channels = (
        frame if len(image.frame_shape) == 3 else frame[..., None] for image, frame in zip(images, frames, strict=True)
    )
    return numpy.concatenate([*channels], axis=-1)


class EnvironmentSpec(NamedTuple):
    """The description of a task: the observations that its environment returns and the actions that it accepts."""

    spec: SegmentSpec
    parts: tuple[Part, ...] | None  # that make the vector, in order; None or empty: not recorded, or there is none
    low: tuple[float, ...] | None  # bounds of the elements of an action; None if actions are discrete
    high: tuple[float, ...] | None
    images: tuple[ImageSpec, ...] = ()  # that make a frame, in order; empty: the environment returns frames, or none
    action_dtype: str = "float32"  # of the environment's actions
    first_action: int = 0  # the environment's number of the discrete action 0
    action_part: Part | None = None  # of an array of several discrete parts, whose combinations are numbered row by row
    frames_per_second: float | None = None  # Gymnasium, JAX: of a video; None if there can be no video
    reading: str = ""  # Gymnasium, JAX: one line that describes how observations are read
    caution: str = ""  # Gymnasium, JAX: a warning about how observations are read

    def scaled(self, actions: np.ndarray) -> np.ndarray:
        """Returns actions of the spec as the environment accepts them.

        Discrete: int32[N], or arrays of several parts, [N, ...] of the environment's dtype. Continuous: [N, A] of the
        environment's dtype, within its bounds.
        """
        if (part := self.action_part) is not None:
            parts = np.stack(np.unravel_index(actions, part.counts), axis=-1) + np.array(part.starts)
            return parts.reshape(-1, *part.shape).astype(self.action_dtype)
        if self.low is None or self.high is None:
            return actions.astype(np.int32) + np.int32(self.first_action)
        low, high = np.array(self.low), np.array(self.high)
        scaled = low + (actions.astype(np.float64) + 1) / 2 * (high - low)
        return np.clip(scaled, low, high).astype(self.action_dtype)

    def numbered(self, actions: np.ndarray) -> np.ndarray:
        """Returns the agent's numbers of discrete actions, int[N]: the inverse of `scaled`."""
        if (part := self.action_part) is None:
            return actions - self.first_action
        parts = actions.reshape(len(actions), -1) - np.array(part.starts)
        return np.ravel_multi_index(tuple(parts.T), part.counts, mode="clip")


def valid_actions(mask: Any, counts: tuple[int, ...]) -> np.ndarray:
    """Returns which actions are valid, bool[*N, A], of masks of 0 and 1 (or bool). Raises ValueError.

    `counts`: numbers of choices of the parts of an action, whose combinations are the A actions, row by row. `mask`: of
    the combinations, [*N, A] or [*N, *counts]; or of each part, [*N, sum(counts)] or a tuple of [*N, counts[i]] (in
    sb3-contrib's convention), of which a combination is valid if all its parts are. If A = sum(counts), [*N, A] is of
    the combinations.
    """
    of_parts = isinstance(mask, tuple) and all(np.ndim(part) for part in mask)
    array = np.concatenate([np.asarray(part) for part in mask], axis=-1) if of_parts else np.asarray(mask)
    if array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
        raise ValueError(f"{array.dtype}{list(array.shape)} with other values than 0 and 1")
    count, valid = math.prod(counts), array != 0
    if array.shape[-len(counts) :] == counts:
        return valid.reshape(*array.shape[: -len(counts)], count)
    if array.shape[-1:] == (count,) and not of_parts:
        return valid
    if array.shape[-1:] != (sum(counts),):
        raise ValueError(f"{array.dtype}{list(array.shape)}")
    joined = np.ones((*array.shape[:-1], 1), bool)
    for part in np.split(valid, np.cumsum(counts)[:-1], axis=-1):
        joined = (joined[..., None] & part[..., None, :]).reshape(*array.shape[:-1], -1)
    return joined


class Step(NamedTuple):
    """One step of the environments `env_id`: A of the E environments of an actor."""

    env_id: np.ndarray  # int32[A]
    observation: Observation  # [A, F, *O]
    reward: np.ndarray  # float32[A], raw; result of the previous action
    first: np.ndarray  # bool[A], a new episode starts with this observation; the previous action was ignored
    terminated: np.ndarray  # bool[A], game over: nothing follows this observation
    truncated: np.ndarray  # bool[A], time limit: the game would have gone on from this observation
    life_lost: np.ndarray  # bool[A], fewer lives than at the previous step
    info: np.ndarray  # float32[A, K], the K numbers of `metrics.info`; NaN if the environment does not give one


Columns: TypeAlias = dict[str, np.ndarray]
"""The columns of one segment, [L, ...] each, or of several, [N, L, ...]."""


def zero_columns(spec: SegmentSpec) -> Columns:
    """Returns the columns of a segment in which no transition starts."""
    return {name: np.zeros((spec.slots, *shape), dtype) for name, dtype, shape in spec.columns}


class Segment(NamedTuple):
    """A segment with uncompressed frames."""

    frames: Observation  # [L, *O], of each observation the newest frame, vector and mask only
    columns: Columns


class SegmentRecord(NamedTuple):
    """An encoded segment: a message of its actor, which keeps it until a `SegmentAck`, and a record of the journal."""

    peer_id: PeerId  # of the actor's process
    sequence: Annotated[int, Integer(1, MAX_COUNT)]  # 1, 2, 3 ... within a peer id
    produced: Annotated[int, Integer(0, MAX_COUNT)]  # transitions of the actor so far
    transitions: Annotated[int, Integer(0, 4096)]  # that start in it; the actor's count if the body cannot be decoded
    body: Annotated[bytes, Buffer(MAX_SEGMENT_BYTES)]  # see `apex_jax.segment_codec.encode_segment`
    crc: Annotated[int, Integer(0, 2**32 - 1)]  # zlib.crc32 of the body
