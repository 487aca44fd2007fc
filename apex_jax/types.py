"""Records that cross a border between modules, and the limits of what a run may hold.

Axis legend, used in every shape of this project:

    B  transitions of a batch          K  batches drawn together
    E  environments of an actor        A  those of them that stepped
    F  frames per observation (stack)  L  frame slots of a segment
    C  segments that fit in the replay N  any number of elements
    *O shape of one frame: (height, width) of pixels, or (D,) of a vector observation
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

MAX_COUNT = 2**48  # of transitions, segments, actors: enough for any run, no sum overflows, and the journal believes it
MAX_ENVIRONMENT_STEPS = 10**15  # of a run; times a frame skip it still fits in 64 bits
MAX_SEGMENT_BYTES = 2**25
MAX_STREAMED_SEGMENTS = 64  # in one message to the learner, as far as they fit in a few megabytes
MAX_WEIGHTS_BYTES = 2**29
PEER_TIMEOUT_SECONDS = 10.0  # a peer that has said nothing for so long is dead, or as good as that


class SegmentSpec(NamedTuple):
    """Geometry of a segment; every role of a run agrees on it.

    A segment is a run of `slots` consecutive frames of one environment. The observation at slot f is the stack of
    frames f-F+1..f, so slots 0..F-2 start no transition; a transition that starts at f bootstraps at most n slots
    later, so the last n slots start none either. Consecutive segments overlap by `overlap` slots: each transition
    starts in exactly one segment, and each segment can be read without any other.
    """

    frame_shape: tuple[int, ...]
    frame_dtype: str  # "uint8" or "float32"
    frame_stack: int
    slots: int
    n_step: int
    num_actions: int

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
        """Bytes of one uncompressed frame."""
        return math.prod(self.frame_shape) * np.dtype(self.frame_dtype).itemsize

    def max_environment_steps(self, num_environments: int) -> int:
        """Environment steps that one segment may tell of: a few segments of every environment were left out before."""
        return 16 * num_environments * self.slots


class Step(NamedTuple):
    """What the environments `env_id` of an actor returned: A of its E environments."""

    env_id: np.ndarray  # int32[A]
    observation: np.ndarray  # uint8|float32[A, F, *O]
    reward: np.ndarray  # float32[A], raw; belongs to the action sent before
    first: np.ndarray  # bool[A], a new episode starts with this observation; the action sent before was ignored
    terminated: np.ndarray  # bool[A], game over: nothing follows this observation
    truncated: np.ndarray  # bool[A], time limit: the game would have gone on from this observation
    life_lost: np.ndarray  # bool[A], fewer lives than one step before


class SegmentColumns(NamedTuple):
    """What a segment says of the transition that starts at each slot; zeros where none does."""

    priority: np.ndarray  # float32[L], not yet raised to the priority exponent; 0 = no transition starts here
    n_step_return: np.ndarray  # float32[L], sum of the (clipped) discounted rewards of k steps
    discount: np.ndarray  # float32[L], gamma^k, or 0 where the episode terminated within those k steps
    action: np.ndarray  # int32[L], in [0, num_actions)
    bootstrap_offset: np.ndarray  # uint8[L], k in 1..n: the bootstrap observation ends at slot f + k


class Segment(NamedTuple):
    """A segment with its pixels."""

    frames: np.ndarray  # uint8|float32[L, *O], the newest frame of each observation only
    columns: SegmentColumns


class SegmentRecord(NamedTuple):
    """An encoded segment and its place in the sequence of its actor."""

    run_id: int  # of the actor's process
    sequence: int  # 1, 2, 3 ... within a run id
    environment_steps: int  # that the actor has made since its previous segment
    transitions: int  # that start in it; of one that cannot be decoded, as its actor says
    body: bytes  # see `apex_jax.segment_codec.encode_segment`
    crc: int  # zlib.crc32 of the body
