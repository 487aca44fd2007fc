"""The replay buffer equals a naive ring, and new transitions get the priority of the actor or the largest so far."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from apex_jax.replay.buffer import PriorityResult, ReplayBuffer
from apex_jax.replay.importance_weights import importance_weights
from apex_jax.replay.replay import Replay
from apex_jax.types import Columns
from tests.rigs.buffers import SPEC, L, buffer_of, columns_of, leaf, priorities_at, random_columns, update
from tests.rigs.links import CONFIG
from tests.rigs.validity import check_buffer

assert SPEC.max_transitions == 9


class NaiveBuffer:
    """The slow twin: a dictionary of insertion numbers, one Python loop for everything."""

    def __init__(self, num_segments: int, alpha: float) -> None:
        self.num_segments = num_segments
        self.alpha = alpha
        self.live: dict[int, tuple[bytes, float]] = {}
        self.powers: dict[int, float] = {}
        self.inserted = 0
        self.largest = 0.0

    def insert(self, body: bytes, priority: np.ndarray, now_seconds: float) -> None:
        self.inserted += 1
        self.live.pop(self.inserted - self.num_segments, None)
        self.live[self.inserted] = (body, now_seconds)
        self.largest = max(self.largest, float(priority.max()))
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
                self.largest = max(self.largest, priority)
        return PriorityResult(applied, stale, invalid)


@pytest.mark.parametrize("seed", range(10))
def test_agrees_with_a_naive_ring_under_random_operations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_segments, alpha = int(rng.integers(2, 7)), float(rng.choice([0.0, 0.6, 1.0]))
    buffer, naive = buffer_of(num_segments, alpha, seed=seed), NaiveBuffer(num_segments, alpha)
    cursor, empty_bytes = 0, buffer.stored_bytes
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
            assert run.ring_slots.tolist() == [naive.slot(number) for number in expected]
            cursor = run.cursor
            streamed.extend(expected)
        check_buffer(buffer)
        assert (buffer.inserted_segments, buffer.size_segments) == (naive.inserted, len(naive.live))
        assert buffer.max_priority == naive.largest
        assert buffer.stored_bytes == empty_bytes + sum(len(body) for body, _ in naive.live.values())
        powers = [naive.powers.get(index, 0.0) for index in range(num_segments * L)]
        np.testing.assert_allclose(buffer.tree.get(np.arange(num_segments * L)), powers, rtol=1e-12)
        assert buffer.size_transitions == sum(power > 0 for power in powers)
        if buffer.size_transitions:
            draw = buffer.sample(2, 5, float(now))
            assert all(powers[index] > 0 for index in draw.indices)
            numbers = [naive.number(index) for index in draw.indices]
            assert draw.generations.tolist() == numbers
            assert draw.age_seconds == pytest.approx(now - np.mean([naive.live[number][1] for number in numbers]))
    assert streamed == sorted(set(streamed))


@pytest.mark.parametrize("alpha", [0.6, 1.0, 10.0])
def test_any_float32_priority_neither_vanishes_nor_overflows(alpha: float) -> None:
    buffer = buffer_of(alpha=alpha)
    buffer.insert(b"", priorities_at(f1=1e-45, f2=3.4e38), 0.0)
    assert update(buffer, (1, 1, 3.4e38), (2, 1, 1e-45)) == PriorityResult(2, 0, 0)
    draw = buffer.sample(2, 50, 0.0)
    weights = importance_weights(draw.probabilities[None], 10.0)
    assert np.isfinite(weights).all()
    assert weights.max() == 1.0
    assert buffer.size_transitions == 2
    check_buffer(buffer)


def test_weights_are_those_of_the_paper_over_the_largest_of_the_batch() -> None:
    probabilities = np.random.default_rng(3).random((3, 8)) + 1e-3
    weights = (1000 * probabilities) ** -0.4
    expected = weights / weights.max(axis=1, keepdims=True)
    np.testing.assert_allclose(importance_weights(probabilities, 0.4), expected, rtol=1e-6)
    assert importance_weights(probabilities, 0.0).tolist() == np.ones((3, 8)).tolist()


def test_capacity_is_a_whole_number_of_segments_and_at_least_two() -> None:
    rng = np.random.default_rng(0)
    assert [ReplayBuffer(SPEC, size, 0.6, rng).capacity_segments for size in (1, 18, 44, 45)] == [2, 2, 4, 5]


def test_each_batch_takes_one_transition_from_each_of_its_strata() -> None:
    buffer = buffer_of(num_segments=2, alpha=1.0)
    buffer.insert(b"", columns_of(np.ones(L)), 0.0)
    np.testing.assert_array_equal(buffer.sample(5, L, 0.0).indices, np.tile(np.arange(L), 5))


def test_drawing_from_an_empty_replay_is_refused() -> None:
    buffer = buffer_of()
    with pytest.raises(ValueError, match="nothing to draw"):
        buffer.sample(1, 1, 0.0)
    buffer.insert(b"", priorities_at(), 0.0)
    with pytest.raises(ValueError, match="nothing to draw"):
        buffer.sample(1, 1, 0.0)


@pytest.mark.parametrize("index", [-1, -(4 * L) + 1, 4 * L, 2**31, 2**32 + 1, -(2**32) + 1, 2**63 + 1, 2**64 - 1, 0, 3])
def test_an_index_without_a_transition_is_counted_and_never_wraps(index: int) -> None:
    buffer = buffer_of()
    for _ in range(4):
        buffer.insert(b"", priorities_at(f1=1.0, f11=1.0), 0.0)
    before = buffer.tree.get(np.arange(4 * L))
    assert update(buffer, (index, 1, 9.0)) == PriorityResult(applied=0, stale=0, invalid=1)
    assert update(buffer, (1, 2**32 + 1, 9.0)) == PriorityResult(applied=0, stale=1, invalid=0), "a generation"
    np.testing.assert_array_equal(buffer.tree.get(np.arange(4 * L)), before)


def test_generations_are_the_low_32_bits_of_the_insertion_id() -> None:
    buffer = buffer_of(num_segments=2)
    buffer.inserted_segments = 2**32 - 2
    for body in (b"a", b"b", b"c"):
        buffer.insert(body, priorities_at(f1=1.0), 0.0)
    check_buffer(buffer)
    run = buffer.segments_since(2**32 - 1, 10)
    assert (run.generations.tolist(), run.bodies, run.cursor) == ([0, 1], (b"b", b"c"), 2**32 + 1)


def inserted(buffer: ReplayBuffer, columns: Columns) -> list[float]:
    """Returns the leaves of a segment after its insertion."""
    slot = buffer.insert(b"", columns, 0.0)
    return [leaf(buffer, slot * L + i) for i in range(4)]


def test_initial_priorities_are_the_actors_unless_maximum_is_configured() -> None:
    columns = priorities_at(f1=70.0, f3=0.5)
    settings = replace(
        CONFIG.replay, journal=False, capacity_transitions=18, min_size_to_sample=1, priority_exponent=1.0
    )
    of_actors, maximum = (
        Replay(CONFIG.replace(replay=replace(settings, initial_priority=choice)), SPEC, np.random.default_rng(0)).buffer
        for choice in ("actor", "maximum")
    )
    assert inserted(of_actors, columns) == [0.0, 70.0, 0.0, 0.5]
    assert inserted(maximum, columns) == [0.0, 1.0, 0.0, 1.0]
    update(maximum, (1, 1, 5.0), (3, 1, 0.5))
    assert inserted(maximum, columns) == [0.0, 5.0, 0.0, 5.0]
    assert [leaf(maximum, 1), leaf(maximum, 3)] == [5.0, 0.5]
    check_buffer(maximum)
