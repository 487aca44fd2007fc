"""Specification of the replay buffer."""

from __future__ import annotations

import numpy as np
import pytest

from apex_jax.replay.buffer import PriorityResult, ReplayBuffer
from apex_jax.types import SegmentSpec
from tests.rigs.buffers import SPEC, L, buffer_of, columns_of, leaf, priorities_at, random_columns, update

assert SPEC.max_transitions == 9


class NaiveBuffer:
    """The slow twin: a dictionary of insertion numbers, one Python loop for everything."""

    def __init__(self, num_segments: int, alpha: float) -> None:
        self.num_segments = num_segments
        self.alpha = alpha
        self.live: dict[int, tuple[bytes, float]] = {}
        self.powers: dict[int, float] = {}
        self.inserted = 0

    def insert(self, body: bytes, priority: np.ndarray, now_seconds: float) -> None:
        self.inserted += 1
        self.live.pop(self.inserted - self.num_segments, None)
        self.live[self.inserted] = (body, now_seconds)
        for offset, value in enumerate(priority):
            self.powers[self.slot(self.inserted) * L + offset] = float(value) ** self.alpha if value > 0 else 0.0

    def slot(self, number: int) -> int:
        return (number - 1) % self.num_segments

    def number(self, index: int) -> int:
        return next((number for number in self.live if self.slot(number) == index // L), 0)

    def update(self, indices: np.ndarray, generations: np.ndarray, priorities: np.ndarray) -> PriorityResult:
        applied = stale = invalid = 0
        for index, generation, priority in zip(
            indices.tolist(), generations.tolist(), priorities.tolist(), strict=True
        ):
            if not 0 <= index < self.num_segments * L or not 0 < priority < np.inf:
                invalid += 1
            elif self.number(index) != generation:
                stale += 1
            elif self.powers.get(index, 0.0) == 0:
                invalid += 1
            else:
                applied += 1
                self.powers[index] = priority**self.alpha
        return PriorityResult(applied, stale, invalid)


@pytest.mark.parametrize("seed", range(10))
def test_agrees_with_a_naive_ring_under_random_operations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_segments, alpha = int(rng.integers(2, 7)), float(rng.choice([0.0, 0.6, 1.0]))
    buffer, naive = buffer_of(num_segments, alpha, seed=seed), NaiveBuffer(num_segments, alpha)
    cursor = 0
    streamed: list[int] = []
    for now in range(80):
        operation = rng.integers(4)
        if operation <= 1:
            columns, body = random_columns(rng), rng.bytes(int(rng.integers(1, 20)))
            assert buffer.insert(body, columns, float(now)) == naive.slot(naive.inserted + 1)
            naive.insert(body, columns["priority"], float(now))
        elif operation == 2:
            size = int(rng.integers(0, 30))
            indices = rng.integers(-3, num_segments * L + 3, size)
            generations = np.maximum(0, [naive.number(index) for index in indices] - rng.integers(0, 2, size))
            priorities = rng.choice([0.25, 1.0, 3.0, 0.0, -1.0, np.nan, np.inf, -np.inf], size).astype(np.float32)
            got = buffer.update_priorities(indices.astype(np.int32), generations.astype(np.uint32), priorities)
            assert got == naive.update(indices, generations, priorities)
        else:
            run = buffer.segments_since(cursor, int(rng.integers(0, 4)))
            first = max(cursor, naive.inserted - len(naive.live)) + 1
            expected = range(first, first + len(run.bodies))
            assert run.bodies == tuple(naive.live[number][0] for number in expected)
            assert run.generations.tolist() == list(expected)
            assert run.slots.tolist() == [naive.slot(number) for number in expected]
            cursor = run.cursor
            streamed.extend(expected)
        buffer.check_valid()
        assert (buffer.inserted_segments, buffer.size_segments) == (naive.inserted, len(naive.live))
        powers = [naive.powers.get(index, 0.0) for index in range(num_segments * L)]
        np.testing.assert_allclose(buffer._tree.get(np.arange(num_segments * L)), powers, rtol=1e-12)
        assert buffer.size_transitions == sum(power > 0 for power in powers)
        if buffer.size_transitions:
            draw = buffer.sample(2, 5, float(now))
            assert all(powers[index] > 0 for index in draw.indices.ravel())
            numbers = [naive.number(index) for index in draw.indices.ravel()]
            assert draw.generations.ravel().tolist() == numbers
            assert draw.age_seconds == pytest.approx(now - np.mean([naive.live[number][1] for number in numbers]))
    assert streamed == sorted(set(streamed))


def test_the_oldest_segment_leaves_when_the_ring_is_full() -> None:
    buffer = buffer_of(num_segments=2)
    bodies = (b"first", b"second", b"third")
    assert [buffer.insert(body, priorities_at(f1=1.0), 0.0) for body in bodies] == [0, 1, 0]
    live = buffer.segments_since(0, 10).bodies
    assert live == bodies[1:]
    assert live[0] is bodies[1]  # kept without a copy


def test_alpha_zero_draws_all_transitions_alike_and_no_other_slot() -> None:
    buffer = buffer_of(alpha=0.0)
    buffer.insert(b"", priorities_at(f1=4.0, f2=1e-20), 0.0)
    assert [leaf(buffer, index) for index in range(4)] == [0.0, 1.0, 1.0, 0.0]
    assert set(buffer.sample(1, 100, 0.0).indices.ravel().tolist()) == {1, 2}


@pytest.mark.parametrize("alpha", [0.6, 1.0, 10.0])
def test_any_float32_priority_neither_vanishes_nor_overflows(alpha: float) -> None:
    buffer = buffer_of(alpha=alpha)
    buffer.insert(b"", priorities_at(f1=1e-45, f2=3.4e38), 0.0)
    assert update(buffer, (1, 1, 3.4e38), (2, 1, 1e-45)) == PriorityResult(2, 0, 0)
    draw = buffer.sample(2, 50, 0.0)
    weights = draw.weights(10.0)
    assert np.isfinite(weights).all()
    assert weights.max() == 1.0
    assert buffer.size_transitions == 2
    buffer.check_valid()


def test_capacity_is_a_whole_number_of_segments_and_at_least_two() -> None:
    rng = np.random.default_rng(0)
    assert [ReplayBuffer(SPEC, size, 0.6, rng).capacity_segments for size in (1, 18, 44, 45)] == [2, 2, 4, 5]


def test_stored_bytes_follow_the_bodies() -> None:
    buffer = buffer_of(num_segments=2)
    empty = buffer.stored_bytes
    assert empty >= 2 * L * 8
    for body in (b"x" * 100, b"y" * 10, b"z" * 7):
        buffer.insert(body, priorities_at(f1=1.0), 0.0)
    assert buffer.stored_bytes == empty + 17


def test_max_priority_is_the_largest_ever_stored() -> None:
    buffer = buffer_of(num_segments=2)
    assert buffer.max_priority == 0.0
    buffer.insert(b"", priorities_at(f1=2.0), 0.0)
    update(buffer, (1, 1, 5.0), (1, 9, 7.0), (1, 1, 0.5))
    assert buffer.max_priority == 5.0


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1.0, np.nan] * 6, "finite"),
        ([1.0, np.inf] * 6, "finite"),
        ([1.0, -1.0] * 6, "finite"),
        ([1.0] * (L + 1), "12 frame slots"),
    ],
)
def test_a_segment_with_bad_priorities_is_refused_and_changes_nothing(priority: list[float], message: str) -> None:
    buffer = buffer_of()
    with pytest.raises(ValueError, match=message):
        buffer.insert(b"", columns_of(np.array(priority)), 0.0)
    assert buffer.inserted_segments == buffer.size_transitions == 0
    buffer.check_valid()


@pytest.mark.parametrize(
    ("spec", "capacity", "alpha", "message"),
    [
        (SPEC._replace(slots=3), 100, 0.6, "raise slots"),
        (SPEC, 2**31, 0.6, "lower capacity_transitions"),
        (SPEC, 100, -0.1, "priority_exponent"),
        (SPEC, 100, np.nan, "priority_exponent"),
        (SPEC, 100, 11.0, "priority_exponent"),
    ],
)
def test_impossible_parameters_are_refused(spec: SegmentSpec, capacity: int, alpha: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(spec, capacity, alpha, np.random.default_rng(0))


def test_transitions_are_drawn_in_proportion_to_priority_to_the_power_alpha() -> None:
    rng, alpha = np.random.default_rng(1), 0.6
    buffer = buffer_of(num_segments=4, alpha=alpha)
    priorities = [random_columns(rng)["priority"] for _ in range(4)]
    for priority in priorities:
        buffer.insert(b"", columns_of(priority), 0.0)
    draws = 100_000
    counts = np.bincount(buffer.sample(draws, 1, 0.0).indices.ravel(), minlength=4 * L)
    powers = np.where(np.concatenate(priorities) > 0, np.concatenate(priorities).astype(np.float64) ** alpha, 0.0)
    expected = draws * powers / powers.sum()
    drawn = powers > 0
    chi_square = ((counts - expected)[drawn] ** 2 / expected[drawn]).sum()
    assert chi_square < drawn.sum() + 5 * np.sqrt(2 * drawn.sum())
    assert not counts[~drawn].any()


def test_each_batch_takes_one_transition_from_each_of_its_strata() -> None:
    buffer = buffer_of(num_segments=2, alpha=1.0)
    buffer.insert(b"", columns_of(np.ones(L)), 0.0)
    np.testing.assert_array_equal(buffer.sample(5, L, 0.0).indices, np.tile(np.arange(L), (5, 1)))


def test_equal_seeds_draw_equal_batches_and_other_seeds_or_batches_differ() -> None:
    draws = []
    for seed in (3, 3, 4):
        buffer = buffer_of(seed=seed)
        buffer.insert(b"", columns_of(np.ones(L)), 0.0)
        draws.append(buffer.sample(4, 16, 0.0).indices.tolist())
    assert draws[0] == draws[1] != draws[2]
    assert draws[0][0] != draws[0][1]


def test_weights_are_n_times_p_to_the_minus_beta_over_the_largest_of_the_batch() -> None:
    beta = 0.4
    buffer = buffer_of(alpha=0.6)
    rng = np.random.default_rng(2)
    for _ in range(3):
        buffer.insert(b"", random_columns(rng), 0.0)
    draw = buffer.sample(3, 8, 0.0)
    probabilities = buffer._tree.get(draw.indices) / buffer._tree.total
    weights = (buffer.size_transitions * probabilities) ** -beta
    of_draw = draw.weights(beta)
    np.testing.assert_allclose(of_draw, weights / weights.max(axis=1, keepdims=True), rtol=1e-6)
    assert (of_draw.max(axis=1) == 1.0).all()


def test_a_draw_has_the_dtypes_and_shapes_of_its_message() -> None:
    buffer = buffer_of()
    buffer.insert(b"", priorities_at(f1=1.0), 5.0)
    draw = buffer.sample(2, 3, 7.5)
    assert [array.dtype for array in draw[:3]] == [np.int32, np.uint32, np.float64]
    assert [array.shape for array in draw[:3]] == [(2, 3)] * 3
    assert draw.age_seconds == 2.5


def test_drawing_from_an_empty_replay_is_refused() -> None:
    buffer = buffer_of()
    with pytest.raises(ValueError, match="nothing to draw"):
        buffer.sample(1, 1, 0.0)
    buffer.insert(b"", priorities_at(), 0.0)
    with pytest.raises(ValueError, match="nothing to draw"):
        buffer.sample(1, 1, 0.0)


def test_late_priority_of_an_overwritten_slot_is_ignored_and_counted() -> None:
    buffer = buffer_of(num_segments=2, alpha=1.0)
    for _ in range(3):
        buffer.insert(b"", priorities_at(f1=1.0), 0.0)
    assert update(buffer, (1, 1, 9.0), (1, 3, 5.0), (L + 1, 2, 7.0)) == PriorityResult(applied=2, stale=1, invalid=0)
    assert (leaf(buffer, 1), leaf(buffer, L + 1)) == (5.0, 7.0)


def test_late_priority_is_stale_even_if_the_new_segment_has_no_transition_there() -> None:
    buffer = buffer_of(num_segments=2)
    for columns in (priorities_at(f1=1.0), priorities_at(f1=1.0), priorities_at(f2=1.0)):
        buffer.insert(b"", columns, 0.0)
    assert update(buffer, (1, 1, 9.0)) == PriorityResult(applied=0, stale=1, invalid=0)
    assert leaf(buffer, 1) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0, 0.0])
def test_invalid_priority_is_counted_and_the_valid_ones_of_its_message_are_applied(bad: float) -> None:
    buffer = buffer_of(alpha=1.0)
    buffer.insert(b"", priorities_at(f1=1.0, f2=1.0), 0.0)
    assert update(buffer, (1, 1, bad), (2, 1, 3.0)) == PriorityResult(applied=1, stale=0, invalid=1)
    assert (leaf(buffer, 1), leaf(buffer, 2)) == (1.0, 3.0)


@pytest.mark.parametrize("index", [-1, -(4 * L) + 1, 4 * L, 2**31, 2**32 + 1, -(2**32) + 1, 2**63 + 1, 2**64 - 1, 0, 3])
def test_an_index_without_a_transition_is_counted_and_never_wraps(index: int) -> None:
    buffer = buffer_of()
    for _ in range(4):
        buffer.insert(b"", priorities_at(f1=1.0, f11=1.0), 0.0)
    before = buffer._tree.get(np.arange(4 * L))
    assert update(buffer, (index, 1, 9.0)) == PriorityResult(applied=0, stale=0, invalid=1)
    np.testing.assert_array_equal(buffer._tree.get(np.arange(4 * L)), before)


def test_a_generation_never_wraps_into_a_live_one() -> None:
    buffer = buffer_of()
    buffer.insert(b"", priorities_at(f1=1.0), 0.0)
    assert update(buffer, (1, 2**32 + 1, 9.0)) == PriorityResult(applied=0, stale=1, invalid=0)


def test_last_valid_value_of_duplicate_indices_counts() -> None:
    buffer = buffer_of(alpha=1.0)
    buffer.insert(b"", priorities_at(f1=1.0), 0.0)
    result = update(buffer, (1, 1, 2.0), (1, 1, 3.0), (1, 1, np.nan), (1, 7, 9.0))
    assert result == PriorityResult(applied=2, stale=1, invalid=1)
    assert leaf(buffer, 1) == 3.0


@pytest.mark.parametrize(
    ("indices", "generations", "priorities", "message"),
    [
        ([1, 2], [1], [1.0], "one and the same"),
        ([1], [1, 1], [1.0], "one and the same"),
        ([1], [1], [1.0, 1.0], "one and the same"),
        ([[1]], [[1]], [[1.0]], "one and the same"),
        ([1.0], [1], [1.0], "integers"),
        ([1], [1.0], [1.0], "integers"),
    ],
)
def test_an_update_of_ragged_arrays_or_without_integers_is_refused(
    indices: list[int], generations: list[int], priorities: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        buffer_of().update_priorities(np.array(indices), np.array(generations), np.array(priorities))


def test_learner_that_has_every_segment_gets_none() -> None:
    buffer = buffer_of()
    buffer.insert(b"a", priorities_at(f1=1.0), 0.0)
    run = buffer.segments_since(1, 10)
    assert (run.slots.size, run.generations.size, run.bodies, run.cursor) == (0, 0, (), 1)


def test_cursor_behind_the_ring_continues_at_the_oldest_live_segment() -> None:
    buffer = buffer_of(num_segments=3)
    for number in range(1, 9):
        buffer.insert(bytes([number]), priorities_at(f1=1.0), 0.0)
    run = buffer.segments_since(2, 2)
    assert run.bodies == (b"\x06", b"\x07")
    assert (run.slots.tolist(), run.generations.tolist(), run.cursor) == ([2, 0], [6, 7], 7)
    assert [array.dtype for array in run[:2]] == [np.int32, np.uint32]


@pytest.mark.parametrize("cursor", [-1, 2])
def test_cursor_beyond_the_newest_insertion_is_refused(cursor: int) -> None:
    buffer = buffer_of()
    buffer.insert(b"a", priorities_at(f1=1.0), 0.0)
    with pytest.raises(ValueError, match="cursor"):
        buffer.segments_since(cursor, 1)


def test_generations_are_the_low_32_bits_of_the_insertion_id() -> None:
    buffer = buffer_of(num_segments=2)
    buffer.inserted_segments = 2**32 - 2
    for body in (b"a", b"b", b"c"):
        buffer.insert(body, priorities_at(f1=1.0), 0.0)
    buffer.check_valid()
    run = buffer.segments_since(2**32 - 1, 10)
    assert (run.generations.tolist(), run.bodies, run.cursor) == ([0, 1], (b"b", b"c"), 2**32 + 1)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [("size_transitions", "size_transitions"), ("inserted_segments", "generations"), ("_body_bytes", "stored_bytes")],
)
def test_check_valid_detects_a_drifted_counter(attribute: str, message: str) -> None:
    buffer = buffer_of()
    buffer.insert(b"a", priorities_at(f1=1.0), 0.0)
    setattr(buffer, attribute, getattr(buffer, attribute) + 1)
    with pytest.raises(AssertionError, match=message):
        buffer.check_valid()


def test_check_valid_detects_a_leaf_without_a_transition() -> None:
    buffer = buffer_of()
    buffer.insert(b"a", priorities_at(f1=1.0), 0.0)
    buffer._tree.set(np.array([0]), np.array([1.0]))
    with pytest.raises(AssertionError, match="not the transitions"):
        buffer.check_valid()
