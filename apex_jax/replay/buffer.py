"""The replay buffer: a ring of encoded segments, and the sum-tree over the transitions that start in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from apex_jax.compiled import FLOATS_READ, INTEGERS_READ, compiled
from apex_jax.replay.sum_tree import SumTree
from apex_jax.types import Columns, SegmentSpec

MAX_EXPONENT = 10.0
MIN_PRIORITY, MAX_PRIORITY = 1e-29, 1e29  # others count as these: raised to MAX_EXPONENT they are still float64 above 0


class Draw(NamedTuple):
    """K batches of B transitions drawn from one state of the replay."""

    indices: np.ndarray  # int32[K, B], segment slot x L + frame slot
    generations: np.ndarray  # uint32[K, B], of the segment in that slot
    weights: np.ndarray  # float32[K, B], importance weights, largest of each batch = 1
    age_seconds: float  # mean over the drawn transitions since their insertion


class PriorityResult(NamedTuple):
    """What became of the elements of a priority update; each is counted once."""

    applied: int
    stale: int  # the segment has been overwritten since
    invalid: int  # index out of range or where no transition starts, priority not positive or not finite


class SegmentRun(NamedTuple):
    """Live segments in the order of their insertion."""

    slots: np.ndarray  # int32[N], where in the ring
    generations: np.ndarray  # uint32[N]
    bodies: tuple[bytes, ...]  # as they were inserted
    cursor: int  # insertion number of the last one: where the next run goes on


class BufferState(NamedTuple):
    """All that a buffer holds beside the bodies; arrays are by slot of its ring, of which M have been used."""

    inserted_segments: int
    priority_exponent: float
    max_priority: float
    random_state: dict[str, Any]  # of the generator of the draws
    insertion_ids: np.ndarray  # int64[M], of the segment's insertion, the first time; 0 = none
    leaves: np.ndarray  # float64[M, L], priorities raised to the exponent
    ages_seconds: np.ndarray  # float64[M], since the insertion


class StoredSegments(NamedTuple):
    """Segments that were once inserted, oldest first."""

    insertion_ids: np.ndarray  # int64[N], of their insertions, ascending
    bodies: Sequence[bytes]
    priorities: np.ndarray  # float32[N, L], which they were inserted with


class ReplayBuffer:
    """FIFO ring of encoded segments whose transitions are drawn in proportion to priority^alpha.

    Leaf slot x L + f of the tree belongs to the transition that starts at frame slot f of the segment in `slot`; it is
    0 where none starts, which is never drawn. Insertion k = 1, 2, 3 ... goes to slot (k - 1) mod capacity_segments,
    and its low 32 bits are the segment's generation. Knows no clock: the caller passes `now_seconds`, which must not
    run backwards.
    """

    def __init__(
        self,
        spec: SegmentSpec,
        capacity_transitions: int,
        priority_exponent: float,
        importance_sampling_exponent: float,
        rng: np.random.Generator,
        from_actors: bool = True,
    ) -> None:
        """`from_actors`: a new transition has the priority its actor computed; else the largest so far, 1 at first."""
        if spec.max_transitions < 1:
            raise ValueError(
                f"segments of {spec.slots} slots, {spec.overlap} of them overlap, hold no transition: raise slots"
            )
        for name, exponent in (
            ("priority_exponent", priority_exponent),
            ("importance_sampling_exponent", importance_sampling_exponent),
        ):
            if not 0 <= exponent <= MAX_EXPONENT:
                raise ValueError(f"{name} must be in [0, {MAX_EXPONENT}], got {exponent}: priorities would overflow")
        self.capacity_segments = spec.ring_segments(capacity_transitions)
        num_leaves = self.capacity_segments * spec.slots
        if num_leaves > 2**31:
            raise ValueError(
                f"{capacity_transitions} transitions take {num_leaves} frame slots, but an int32 index tells only 2^31"
                " apart: lower capacity_transitions"
            )
        self.inserted_segments = 0
        self.size_transitions = 0
        self.max_priority = 0.0  # largest ever stored, not yet raised to the priority exponent
        self._slots = spec.slots
        self._from_actors = from_actors
        self._alpha = priority_exponent
        self._beta = importance_sampling_exponent
        self._rng = rng
        self._tree = SumTree(num_leaves)
        self._bodies = [b""] * self.capacity_segments
        self._body_bytes = 0
        self._missing = 0  # insertions before the oldest live segment of a restored buffer
        self._insertion_ids = np.zeros(self.capacity_segments, np.int64)  # of the insertion, before older ones moved up
        self._generations = np.zeros(self.capacity_segments, np.uint32)
        self._insert_seconds = np.zeros(self.capacity_segments)
        self._num_transitions = np.zeros(self.capacity_segments, np.int32)

    @property
    def size_segments(self) -> int:
        """Live segments."""
        return min(self.inserted_segments - self._missing, self.capacity_segments)

    @property
    def is_full(self) -> bool:
        """Tells whether the next insertion takes the place of the oldest live segment."""
        return self.size_segments == self.capacity_segments

    @property
    def oldest_insertion_id(self) -> int:
        """The first number that the oldest live segment had; with none, that of the next insertion."""
        oldest = self.inserted_segments - self.size_segments
        return int(self._insertion_ids[oldest % self.capacity_segments]) if self.size_segments else oldest + 1

    @property
    def stored_bytes(self) -> int:
        """Bytes of all bodies and arrays."""
        arrays = (self._insertion_ids, self._generations, self._insert_seconds, self._num_transitions)
        return self._body_bytes + self._tree.nbytes + sum(array.nbytes for array in arrays)

    def insert(self, body: bytes, columns: Columns, now_seconds: float) -> int:
        """Stores an encoded segment in place of the oldest one and returns its slot.

        `body` is kept as it is. `ValueError`, and nothing is changed, unless the priorities are float[L], finite and
        not negative.
        """
        priority = columns["priority"]
        if priority.shape != (self._slots,):
            raise ValueError(f"priorities of shape {priority.shape} do not fit segments of {self._slots} frame slots")
        largest = float(priority.max())
        if not (priority.min() >= 0 and largest < np.inf):
            raise ValueError(f"priorities from {priority.min()} to {largest} are not all finite and at least 0")
        if not self._from_actors:
            largest = self.max_priority or 1.0
            priority = np.where(priority > 0, largest, 0.0)
        slot = self.inserted_segments % self.capacity_segments
        num_transitions = int(np.count_nonzero(priority))
        self._tree.set_range(slot * self._slots, self._exponentiate(priority))
        self.size_transitions += num_transitions - int(self._num_transitions[slot])
        self._num_transitions[slot] = num_transitions
        self._body_bytes += len(body) - len(self._bodies[slot])
        self._bodies[slot] = body
        self.inserted_segments += 1
        self._insertion_ids[slot] = self.inserted_segments
        self._generations[slot] = self.inserted_segments & 0xFFFFFFFF
        self._insert_seconds[slot] = now_seconds
        self.max_priority = max(self.max_priority, largest)
        return slot

    def sample(self, num_batches: int, batch_size: int, now_seconds: float) -> Draw:
        """Draws K batches of B transitions, P(i) = p_i^alpha / sum_j p_j^alpha, each stratified over its own B strata.

        `ValueError` if no transition is stored.
        """
        if self.size_transitions == 0:
            raise ValueError("no transition is stored: there is nothing to draw, wait for min_size_to_sample")
        total = self._tree.total
        uniforms = self._rng.random((num_batches, batch_size))
        leaves = self._tree.find(((np.arange(batch_size) + uniforms) * (total / batch_size)).ravel())
        slots = leaves // self._slots
        shape = uniforms.shape
        return Draw(
            indices=leaves.astype(np.int32).reshape(shape),
            generations=self._generations[slots].reshape(shape),
            weights=importance_weights(self._tree.get(leaves).reshape(shape), self._beta),
            age_seconds=float((now_seconds - self._insert_seconds[slots]).mean()),
        )

    def update_priorities(self, indices: np.ndarray, generations: np.ndarray, priorities: np.ndarray) -> PriorityResult:
        """Sets new priorities float[N] of drawn transitions int[N], as far as their segments are still stored.

        Each element is judged on its own; where an index stands twice the last one that can be applied holds.
        `ValueError` if the arrays are not of integers and of one shape [N].
        """
        if not indices.shape == generations.shape == priorities.shape == (indices.size,):
            raise ValueError(
                f"shapes {indices.shape}, {generations.shape}, {priorities.shape} must be one and the same [N]"
            )
        if indices.dtype.kind not in "iu" or generations.dtype.kind not in "iu":
            raise ValueError(f"indices are {indices.dtype} and generations {generations.dtype}: both must be integers")
        leaves = np.ascontiguousarray(indices, np.int64)
        generations = np.ascontiguousarray(generations, np.int64)
        with np.errstate(invalid="ignore"):  # a signalling NaN from the network is refused below as any other
            priorities = np.ascontiguousarray(priorities, np.float64)
        applicable, stale = _applicable(
            leaves, generations, priorities, self._generations, self._tree.leaves, self._slots
        )
        applied = int(np.count_nonzero(applicable))
        if applied:
            priorities = priorities[applicable]
            self._tree.set(leaves[applicable], self._exponentiate(priorities))
            self.max_priority = max(self.max_priority, float(priorities.max()))
        return PriorityResult(applied, stale, indices.size - applied - stale)

    def discard(self, slots: np.ndarray, generations: np.ndarray) -> int:
        """Sets the priorities of segments int[N] to 0, as far as they are still stored; returns how many those are."""
        discarded = 0
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            is_stored = 0 <= slot < self.capacity_segments and self._generations[slot] == generation
            if is_stored and self._num_transitions[slot]:
                self._tree.set_range(slot * self._slots, np.zeros(self._slots))
                self.size_transitions -= int(self._num_transitions[slot])
                self._num_transitions[slot] = 0
                discarded += 1
        return discarded

    def segments_since(self, cursor: int, max_segments: int) -> SegmentRun:
        """Returns the segments after insertion number `cursor`, oldest first, at most `max_segments` of them.

        A cursor that fell off the ring (0, say) goes on at the oldest live segment. `ValueError` for one that no
        insertion has reached.
        """
        if not 0 <= cursor <= self.inserted_segments:
            raise ValueError(f"cursor {cursor} is not in [0, {self.inserted_segments}]: it is of another replay buffer")
        first = max(cursor, self.inserted_segments - self.size_segments)
        last = min(first + max_segments, self.inserted_segments)
        slots = np.arange(first, last) % self.capacity_segments
        return SegmentRun(
            slots=slots.astype(np.int32),
            generations=self._generations[slots],
            bodies=tuple(self._bodies[slot] for slot in slots),
            cursor=last,
        )

    def state(self, now_seconds: float) -> BufferState:
        """Returns a copy of all that a restored buffer needs beside its segments."""
        used = min(self.inserted_segments, self.capacity_segments)
        return BufferState(
            inserted_segments=self.inserted_segments,
            priority_exponent=self._alpha,
            max_priority=self.max_priority,
            random_state=dict(self._rng.bit_generator.state),
            insertion_ids=self._insertion_ids[:used].copy(),
            leaves=self._tree.leaves[: used * self._slots].reshape(used, self._slots).copy(),
            ages_seconds=now_seconds - self._insert_seconds[:used],
        )

    def restore(self, segments: StoredSegments, state: BufferState | None, now_seconds: float) -> int:
        """Fills a buffer that is still empty; returns how many segments have their priorities from `state`.

        The newest segments that fit are taken. Where numbers are missing the older ones move up: the ring has no gaps.
        What `state` does not know of, or contradicts, has the priorities it was inserted with, as all have where its
        exponent is another one. ValueError for a buffer that is not empty, or a random state that is none.
        """
        if self.inserted_segments:
            raise ValueError(
                f"{self.inserted_segments} segments were inserted before: only an empty buffer is restored"
            )
        fitting = slice(-self.capacity_segments, None)
        insertion_ids, bodies = segments.insertion_ids[fitting], segments.bodies[fitting]
        priorities = segments.priorities[fitting]
        known = np.zeros(len(insertion_ids), bool)
        ages = np.zeros(len(insertion_ids))
        leaves = np.zeros((len(insertion_ids), self._slots))
        if state is not None:
            self._rng.bit_generator.state = state.random_state
            self.max_priority = state.max_priority
            slots, in_state = _places(state.insertion_ids, insertion_ids)
            ages[in_state] = state.ages_seconds[slots]
            if state.priority_exponent == self._alpha and state.leaves.shape[1] == self._slots:
                leaves[in_state] = state.leaves[slots]
                is_discarded = ~(leaves > 0).any(axis=1)
                known = in_state & (is_discarded | ((leaves > 0) == (priorities > 0)).all(axis=1))
        leaves[~known] = self._first_powers(priorities[~known])
        self.inserted_segments = max(
            [*insertion_ids[-1:].tolist(), state.inserted_segments if state is not None else 0]
        )
        self._insertion_ids[self._fill(bodies, leaves, now_seconds - ages)] = insertion_ids
        return int(np.count_nonzero(known))

    def check_valid(self) -> None:
        """Asserts that tree, columns and counters tell the same story."""
        self._tree.check_valid()
        leaves = self._tree.get(np.arange(self._tree.capacity)).reshape(-1, self._slots)
        assert ((leaves > 0).sum(axis=1) == self._num_transitions).all(), "leaves above zero are not the transitions"
        assert self.size_transitions == self._num_transitions.sum(), "size_transitions has drifted"
        assert self._body_bytes == sum(map(len, self._bodies)), "stored_bytes has drifted"
        first = self.inserted_segments - self.size_segments
        insertion_ids = np.arange(first, self.inserted_segments)
        assert (self._generations[insertion_ids % self.capacity_segments] == (insertion_ids + 1) % 2**32).all(), (
            "generations differ"
        )

    def _first_powers(self, priorities: np.ndarray) -> np.ndarray:
        """Returns float64[N, L], what the leaves of segments with these priorities were at first."""
        if not self._from_actors:
            priorities = np.where(priorities > 0, self.max_priority or 1.0, 0.0)
        self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))
        return self._exponentiate(priorities)

    def _fill(self, bodies: Sequence[bytes], leaves: np.ndarray, insert_seconds: np.ndarray) -> np.ndarray:
        """Makes these segments the newest up to `inserted_segments`; returns their slots. leaves: float64[N, L]."""
        insertion_ids = np.arange(self.inserted_segments - len(bodies) + 1, self.inserted_segments + 1)
        slots = (insertion_ids - 1) % self.capacity_segments
        ring = np.zeros((self.capacity_segments, self._slots))
        ring[slots] = leaves
        self._tree.set_range(0, ring.ravel())
        self._generations[slots] = (insertion_ids & 0xFFFFFFFF).astype(np.uint32)
        self._insert_seconds[slots] = insert_seconds
        self._num_transitions[slots] = np.count_nonzero(leaves, axis=1)
        self.size_transitions = int(self._num_transitions.sum())
        for slot, body in zip(slots.tolist(), bodies, strict=True):
            self._bodies[slot] = body
        self._body_bytes = sum(map(len, bodies))
        self._missing = self.inserted_segments - len(bodies)
        return slots

    def _exponentiate(self, priority: np.ndarray) -> np.ndarray:
        """Returns float64[N], priority^alpha where a transition starts and 0 elsewhere (0^0 would be 1)."""
        powers = np.minimum(np.maximum(priority, MIN_PRIORITY, dtype=np.float64), MAX_PRIORITY) ** self._alpha
        return np.where(priority > 0, powers, 0.0)


def _places(values: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where in int64[M] those of int64[N] are that are in it, and which these are: bool[N]."""
    order = np.argsort(values)
    at = np.minimum(np.searchsorted(values[order], wanted), max(0, len(values) - 1))
    found = values[order][at] == wanted if len(values) else np.zeros(len(wanted), bool)
    return order[at[found]], found


def importance_weights(powers: np.ndarray, beta: float) -> np.ndarray:
    """Returns float32[K, B], w_i = (N P(i))^-beta / max_j w_j over each batch (Schaul et al. 2016, section 3.4).

    P(i) = p_i^alpha / sum_k p_k^alpha, of which `powers` float64[K, B] holds the numerators. N and the sum are the same
    for the whole batch and cancel: what is left is (min_j P(j) / P(i))^beta, which cannot overflow.
    """
    weights: np.ndarray = (powers.min(axis=1, keepdims=True) / powers) ** beta
    return weights.astype(np.float32)


@compiled(INTEGERS_READ, INTEGERS_READ, FLOATS_READ, numba.uint32[::1], FLOATS_READ, numba.int64)
def _applicable(
    leaves: np.ndarray,
    generations: np.ndarray,
    priorities: np.ndarray,
    live_generations: np.ndarray,
    values: np.ndarray,
    slots: int,
) -> tuple[np.ndarray, int]:
    """Returns bool[N], which elements of a priority update can be applied, and how many others are stale."""
    applicable, stale = np.zeros(leaves.size, np.bool_), 0
    for i in range(leaves.size):
        if not (0 <= leaves[i] < values.size and 0 < priorities[i] < np.inf):
            continue
        if live_generations[leaves[i] // slots] != generations[i]:
            stale += 1
        else:
            applicable[i] = values[leaves[i]] > 0  # else no transition starts there
    return applicable, stale
