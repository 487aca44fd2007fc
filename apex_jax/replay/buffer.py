"""The replay buffer: a ring of encoded segments, and the sum-tree over the transitions that start in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from apex_jax.host.compiled import FLOATS_READ, INTEGERS_READ, compiled
from apex_jax.replay.importance_weights import MIN_PROBABILITY
from apex_jax.replay.sum_tree import SumTree
from apex_jax.types import Columns, SegmentSpec

MIN_PRIORITY, MAX_PRIORITY = 1e-29, 1e29  # clipping range: finite and above 0 to the power of 10, the largest


class Sample(NamedTuple):
    """The N transitions of K batches, one batch after the other, drawn from one state of the replay."""

    indices: np.ndarray  # int32[N], ring slot x L + frame slot
    generations: np.ndarray  # uint32[N], generation of the drawn segment, see `ReplayBuffer`
    probabilities: np.ndarray  # float64[N], P(i) of each transition
    age_seconds: float  # mean over the drawn transitions since their insertion


class PriorityResult(NamedTuple):
    """The outcome of a priority update; each element is counted once."""

    applied: int
    stale: int  # the segment has been overwritten since
    invalid: int  # index out of range or without a transition, or priority not positive or not finite


class SegmentRun(NamedTuple):
    """Live segments in the order of their insertion."""

    ring_slots: np.ndarray  # int32[N], positions in the ring
    generations: np.ndarray  # uint32[N]
    bodies: tuple[bytes, ...]  # as they were inserted
    cursor: int  # insertion id of the last one, from which the next run continues


class BufferState(NamedTuple):
    """Everything in a buffer except the bodies; the arrays have one row per used ring slot, M in all."""

    inserted_segments: int
    priority_exponent: float
    max_priority: float
    random_state: dict[str, Any]  # state of the random generator that draws
    insertion_ids: np.ndarray  # int64[M], original insertion id of the segment, which a restore keeps; 0 = no segment
    leaves: np.ndarray  # float64[M, L], priorities raised to the exponent
    ages_seconds: np.ndarray  # float64[M], since the insertion


class ReplayBuffer:
    """FIFO ring of encoded segments whose transitions are drawn in proportion to priority^alpha.

    The ring has a slot for each segment, a segment has L frame slots. Leaf r x L + f of the tree belongs to the
    transition that starts at frame slot f of the segment in ring slot r. A leaf without a transition is 0 and never
    drawn. Insertion k = 1, 2, 3 ... goes to ring slot (k - 1) mod capacity_segments, and the low 32 bits of k are the
    segment's generation. The buffer has no clock: the caller passes `now_seconds`, which must not decrease.
    """

    def __init__(
        self,
        spec: SegmentSpec,
        capacity_transitions: int,
        priority_exponent: float,
        rng: np.random.Generator,
        from_actors: bool = True,
    ) -> None:
        """`from_actors`: new transitions get their actor's priorities; if False, the largest so far, initially 1."""
        self.capacity_segments = spec.ring_segments(capacity_transitions)
        num_leaves = self.capacity_segments * spec.slots
        self.inserted_segments = 0
        self.size_transitions = 0
        self.max_priority = 0.0  # largest ever stored, before the priority exponent is applied
        self._frame_slots = spec.slots
        self._from_actors = from_actors
        self._alpha = priority_exponent
        self._rng = rng
        self.tree = SumTree(num_leaves)
        self._bodies = [b""] * self.capacity_segments
        self._body_bytes = 0
        self._missing = 0  # number of insertions before the oldest restored segment; 0 if nothing was restored
        self._insertion_ids = np.zeros(self.capacity_segments, np.int64)  # original ids, which a restore keeps
        self.generations = np.zeros(self.capacity_segments, np.uint32)
        self._insert_seconds = np.zeros(self.capacity_segments)
        self._num_transitions = np.zeros(self.capacity_segments, np.int32)

    @property
    def size_segments(self) -> int:
        """Number of live segments."""
        return min(self.inserted_segments - self._missing, self.capacity_segments)

    @property
    def is_full(self) -> bool:
        """True if the next insertion evicts the oldest live segment."""
        return self.size_segments == self.capacity_segments

    @property
    def oldest_insertion_id(self) -> int:
        """Original insertion id of the oldest live segment; if there is none, the id of the next insertion."""
        oldest = self.inserted_segments - self.size_segments
        return int(self._insertion_ids[oldest % self.capacity_segments]) if self.size_segments else oldest + 1

    @property
    def stored_bytes(self) -> int:
        """Bytes of all bodies and arrays."""
        arrays = (self._insertion_ids, self.generations, self._insert_seconds, self._num_transitions)
        return self._body_bytes + self.tree.nbytes + sum(array.nbytes for array in arrays)

    def insert(self, body: bytes, columns: Columns, now_seconds: float) -> int:
        """Stores an encoded segment, evicts the oldest one if the ring is full, and returns the ring slot.

        `body` is stored unchanged; the priorities, float[L], are finite and not negative.
        """
        priority = columns["priority"]
        largest = float(priority.max())
        if not self._from_actors:
            largest = self.max_priority or 1.0
            priority = np.where(priority > 0, largest, 0.0)
        ring_slot = self.inserted_segments % self.capacity_segments
        self._set_leaves(ring_slot, self._exponentiate(priority))
        self._body_bytes += len(body) - len(self._bodies[ring_slot])
        self._bodies[ring_slot] = body
        self.inserted_segments += 1
        self._insertion_ids[ring_slot] = self.inserted_segments
        self.generations[ring_slot] = self.inserted_segments & 0xFFFFFFFF
        self._insert_seconds[ring_slot] = now_seconds
        self.max_priority = max(self.max_priority, largest)
        return ring_slot

    def sample(self, batches: int, size: int, now_seconds: float) -> Sample:
        """Draws `batches` of `size` transitions, P(i) = p_i^alpha / sum_j p_j^alpha, each batch in `size` strata.

        Raises ValueError if no transition is stored.
        """
        if self.size_transitions == 0:
            raise ValueError("no transition is stored: there is nothing to draw, wait for min_size_to_sample")
        total = self.tree.total
        stratum = np.tile(np.arange(size), batches)
        leaves = self.tree.find((stratum + self._rng.random(stratum.size)) * (total / size))
        ring_slots = leaves // self._frame_slots
        return Sample(
            indices=leaves.astype(np.int32),
            generations=self.generations[ring_slots],
            probabilities=np.maximum(self.tree.get(leaves) / total, MIN_PROBABILITY),
            age_seconds=float((now_seconds - self._insert_seconds[ring_slots]).mean()),
        )

    def update_priorities(self, indices: np.ndarray, generations: np.ndarray, priorities: np.ndarray) -> PriorityResult:
        """Sets new priorities float[N] of drawn transitions int[N] whose segments are still stored.

        Each element is checked separately. If an index occurs twice, the last applicable element counts.
        """
        leaves = np.ascontiguousarray(indices, np.int64)
        generations = np.ascontiguousarray(generations, np.int64)
        with np.errstate(invalid="ignore"):  # a signalling NaN is rejected below like any other
            priorities = np.ascontiguousarray(priorities, np.float64)
        applicable, stale = _applicable(
            leaves, generations, priorities, self.generations, self.tree.leaves, self._frame_slots
        )
        applied = int(np.count_nonzero(applicable))
        if applied:
            priorities = priorities[applicable]
            self.tree.set(leaves[applicable], self._exponentiate(priorities))
            self.max_priority = max(self.max_priority, float(priorities.max()))
        return PriorityResult(applied, stale, indices.size - applied - stale)

    def discard(self, ring_slots: np.ndarray, generations: np.ndarray) -> int:
        """Sets to 0 all priorities of those segments int[N] that are still stored; returns how many it changed."""
        discarded = 0
        for ring_slot, generation in zip(ring_slots.tolist(), generations.tolist(), strict=True):
            is_stored = 0 <= ring_slot < self.capacity_segments and self.generations[ring_slot] == generation
            if is_stored and self._num_transitions[ring_slot]:
                self._set_leaves(ring_slot, np.zeros(self._frame_slots))
                discarded += 1
        return discarded

    def segments_since(self, cursor: int, max_segments: int) -> SegmentRun:
        """Returns at most `max_segments` segments after insertion `cursor`, oldest first.

        If the segment after the cursor has been evicted, the run begins at the oldest live segment.
        """
        first = max(cursor, self.inserted_segments - self.size_segments)
        last = min(first + max_segments, self.inserted_segments)
        ring_slots = np.arange(first, last) % self.capacity_segments
        return SegmentRun(
            ring_slots=ring_slots.astype(np.int32),
            generations=self.generations[ring_slots],
            bodies=tuple(self._bodies[ring_slot] for ring_slot in ring_slots),
            cursor=last,
        )

    def state(self, now_seconds: float) -> BufferState:
        """Returns a copy of everything that a restored buffer needs in addition to its segments."""
        used = min(self.inserted_segments, self.capacity_segments)
        return BufferState(
            inserted_segments=self.inserted_segments,
            priority_exponent=self._alpha,
            max_priority=self.max_priority,
            random_state=dict(self._rng.bit_generator.state),
            insertion_ids=self._insertion_ids[:used].copy(),
            leaves=self.tree.leaves[: used * self._frame_slots].reshape(used, self._frame_slots).copy(),
            ages_seconds=now_seconds - self._insert_seconds[:used],
        )

    def restore(
        self, segments: Sequence[tuple[int, bytes, np.ndarray]], state: BufferState | None, now_seconds: float
    ) -> None:
        """Fills an empty buffer with segments that were inserted earlier, oldest first; the newest ones that fit.

        `segments`: the original insertion id, the body and the initial priorities float32[L] of each. If insertion ids
        are missing, older segments move up, so that the ring has no gaps. Segments that are missing from `state`, or
        have other transitions there, get their initial priorities, as do all if the priority exponent has changed.
        """
        segments = segments[-self.capacity_segments :]
        newest, rows = max((insertion_id for insertion_id, _, _ in segments), default=0), dict[int, int]()
        has_leaves = False
        if state is not None:
            self._rng.bit_generator.state = state.random_state
            self.max_priority = state.max_priority
            newest = max(newest, state.inserted_segments)
            rows = {insertion_id: row for row, insertion_id in enumerate(state.insertion_ids.tolist())}
            has_leaves = state.priority_exponent == self._alpha and state.leaves.shape[1] == self._frame_slots
        self.inserted_segments = self._missing = newest - len(segments)
        for insertion_id, body, priority in segments:
            row = rows.get(insertion_id)
            age_seconds = state.ages_seconds[row] if state is not None and row is not None else 0.0
            ring_slot = self.insert(body, {"priority": priority}, now_seconds - age_seconds)
            self._insertion_ids[ring_slot] = insertion_id
            if state is not None and row is not None and has_leaves:
                leaves = state.leaves[row]
                if not leaves.any() or np.array_equal(leaves > 0, priority > 0):  # the first if it was discarded
                    self._set_leaves(ring_slot, leaves)

    def _set_leaves(self, ring_slot: int, leaves: np.ndarray) -> None:
        """Sets the leaves float64[L] of a segment, and counts its transitions."""
        num_transitions = int(np.count_nonzero(leaves))
        self.tree.set_range(ring_slot * self._frame_slots, leaves)
        self.size_transitions += num_transitions - int(self._num_transitions[ring_slot])
        self._num_transitions[ring_slot] = num_transitions

    def _exponentiate(self, priority: np.ndarray) -> np.ndarray:
        """Returns float64[N], priority^alpha for each priority above 0, and 0 for the others (0^0 would be 1)."""
        powers = np.minimum(np.maximum(priority, MIN_PRIORITY, dtype=np.float64), MAX_PRIORITY) ** self._alpha
        return np.where(priority > 0, powers, 0.0)


@compiled(INTEGERS_READ, INTEGERS_READ, FLOATS_READ, numba.uint32[::1], FLOATS_READ, numba.int64)
def _applicable(
    leaves: np.ndarray,
    generations: np.ndarray,
    priorities: np.ndarray,
    live_generations: np.ndarray,
    values: np.ndarray,
    frame_slots: int,
) -> tuple[np.ndarray, int]:
    """Returns bool[N], the applicable elements of a priority update, and the number of stale ones."""
    applicable, stale = np.zeros(leaves.size, np.bool_), 0
    for i in range(leaves.size):
        if not (0 <= leaves[i] < values.size and 0 < priorities[i] < np.inf):
            continue
        if live_generations[leaves[i] // frame_slots] != generations[i]:
            stale += 1
        else:
            applicable[i] = values[leaves[i]] > 0  # a leaf of 0 has no transition
    return applicable, stale
