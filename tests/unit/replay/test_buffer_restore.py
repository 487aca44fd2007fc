"""A replay buffer that is saved and restored goes on as if nothing had happened."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from apex_jax.replay.buffer import BufferState, ReplayBuffer
from tests.rigs.buffers import SPEC, L, buffer_of, columns_of, leaf, priorities_at, random_columns, update
from tests.rigs.validity import check_buffer


class Disk:
    """The slow twin of a journal: every segment ever inserted, and the newest saved state."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, bytes, np.ndarray]] = []
        self.state: BufferState | None = None

    def insert(self, buffer: ReplayBuffer, body: bytes, priority: np.ndarray, now_seconds: float) -> None:
        buffer.insert(body, columns_of(priority), now_seconds)
        self.segments.append((buffer.inserted_segments, body, priority.astype(np.float32)))

    def restore(self, buffer: ReplayBuffer, now_seconds: float) -> None:
        buffer.restore(self.segments, self.state, now_seconds)

    def restored(self, capacity: int = 4, alpha: float = 1.0) -> ReplayBuffer:
        """Returns a new buffer that was restored from this disk, and is sound."""
        buffer = buffer_of(capacity, alpha)
        self.restore(buffer, 0.0)
        check_buffer(buffer)
        return buffer


def assert_same(one: ReplayBuffer, other: ReplayBuffer, now_seconds: float) -> None:
    check_buffer(one)
    check_buffer(other)
    for field, a, b in zip(BufferState._fields, one.state(now_seconds), other.state(now_seconds), strict=True):
        if field == "ages_seconds":
            np.testing.assert_allclose(np.asarray(a), np.asarray(b))
        else:
            np.testing.assert_array_equal(a, b, err_msg=field)
    assert (one.size_transitions, one.stored_bytes) == (other.size_transitions, other.stored_bytes)
    for a, b in zip(one.segments_since(0, 99), other.segments_since(0, 99), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seed", range(10))
def test_buffer_restored_at_random_moments_equals_one_that_was_never_restored(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity, alpha = int(rng.integers(2, 7)), float(rng.choice([0.0, 0.6, 1.0]))
    disk, twin, buffer = Disk(), buffer_of(capacity, alpha, seed=seed), buffer_of(capacity, alpha, seed=seed)
    for now in range(120):
        operation = rng.integers(6)
        if operation <= 2:
            body, priority = rng.bytes(int(rng.integers(1, 20))), random_columns(rng)["priority"]
            twin.insert(body, columns_of(priority), float(now))
            disk.insert(buffer, body, priority, float(now))
        elif operation == 3:
            indices = rng.integers(0, capacity * L, 10)
            generations = twin.generations[indices // L].astype(np.int64)
            priorities = rng.random(10).astype(np.float32) * 9
            assert twin.update_priorities(indices, generations, priorities) == buffer.update_priorities(
                indices, generations, priorities
            )
        elif operation == 4 and twin.size_transitions:
            for a, b in zip(twin.sample(2, 3, float(now)), buffer.sample(2, 3, float(now)), strict=True):
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-12)
        else:
            disk.state = buffer.state(float(now))
            buffer = buffer_of(capacity, alpha, seed=seed + 99)
            disk.restore(buffer, float(now))
        assert_same(twin, buffer, float(now))


@pytest.mark.parametrize("seed", range(10))
def test_segments_inserted_after_the_snapshot_get_their_initial_priorities(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(2, 7))
    disk, buffer = Disk(), buffer_of(capacity)
    for _ in range(int(rng.integers(0, 12))):
        disk.insert(buffer, rng.bytes(3), random_columns(rng)["priority"], 0.0)
    if buffer.size_transitions:
        indices = rng.integers(0, capacity * L, 40)
        buffer.update_priorities(indices, buffer.generations[indices // L].astype(np.int64), rng.random(40))
    disk.state = buffer.state(0.0) if rng.random() < 0.8 else None
    twin = disk.restored(capacity, alpha=0.6)  # here nothing is newer than the state
    for _ in range(int(rng.integers(0, 12))):
        body, priority = rng.bytes(3), random_columns(rng)["priority"]
        disk.insert(buffer, body, priority, 0.0)
        twin.insert(body, columns_of(priority), 0.0)
    restored = disk.restored(capacity, alpha=0.6)
    saved, known = (disk.state.inserted_segments, disk.state.max_priority) if disk.state is not None else (0, 0.0)
    live = disk.segments[-capacity:]
    since = [float(priority.max()) for number, _, priority in live if number > saved]
    assert restored.max_priority == max([known, *since]), "of what was overwritten meanwhile nothing is left"
    twin.max_priority = restored.max_priority
    assert_same(twin, restored, 0.0)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 5), (5, 3), (3, 4)])
def test_with_a_smaller_capacity_the_newest_segments_keep_their_priorities(before: int, after: int) -> None:
    disk, buffer = Disk(), buffer_of(before, alpha=1.0)
    for number in range(1, 12):
        disk.insert(buffer, bytes([number]), priorities_at(f1=float(number))["priority"], 0.0)
    newest = 11 - min(before, after)
    for slot, number in zip(*buffer.segments_since(newest, 99)[:2], strict=True):
        update(buffer, (int(slot) * L + 1, int(number), 100.0 + number))
    disk.state = buffer.state(0.0)
    disk.segments = disk.segments[-before:]
    restored = disk.restored(after)
    run = restored.segments_since(0, 99)
    assert run.bodies == tuple(bytes([number]) for number in range(newest + 1, 12))
    assert run.generations.tolist() == list(range(newest + 1, 12))
    assert [leaf(restored, slot * L + 1) for slot in run.ring_slots] == [100.0 + n for n in range(newest + 1, 12)]
    restored.insert(b"next", priorities_at(f2=1.0), 0.0)
    check_buffer(restored)
    assert restored.segments_since(0, 99).bodies[-1] == b"next"


def test_saved_priorities_that_contradict_their_segment_are_ignored() -> None:
    disk, buffer = Disk(), buffer_of(alpha=1.0)
    disk.insert(buffer, b"a", priorities_at(f1=4.0)["priority"], 0.0)
    disk.insert(buffer, b"b", priorities_at(f1=4.0)["priority"], 0.0)
    disk.state = buffer.state(0.0)
    disk.state.leaves[:, 3], disk.state.leaves[:, 1] = 7.0, [0.0, 7.0]
    restored = disk.restored()
    assert (leaf(restored, 1), leaf(restored, L + 1), leaf(restored, L + 3)) == (4.0, 4.0, 0.0)


def test_a_discarded_segment_stays_discarded_over_a_restart() -> None:
    disk, buffer = Disk(), buffer_of(alpha=1.0)
    disk.insert(buffer, b"a", priorities_at(f1=4.0)["priority"], 0.0)
    disk.insert(buffer, b"b", priorities_at(f1=4.0, f2=1.0)["priority"], 0.0)
    assert buffer.discard(np.array([1, 1, 0, 7]), np.array([2, 2, 9, 1])) == 1
    disk.state = buffer.state(0.0)
    restored = disk.restored()
    assert (leaf(restored, 1), leaf(restored, L + 1), restored.size_transitions) == (4.0, 0.0, 1)


@pytest.mark.parametrize("missing", [{1}, {3}, {5}, {1, 2}, {2, 4}, {4, 5}, {1, 2, 3, 4, 5}])
def test_older_segments_move_up_into_gaps_and_keep_their_priorities(missing: set[int]) -> None:
    disk, buffer = Disk(), buffer_of(4, alpha=1.0)
    for number in range(1, 6):
        disk.insert(buffer, bytes([number]), priorities_at(f1=1.0)["priority"], 0.0)
    for slot, number in zip(*buffer.segments_since(0, 99)[:2], strict=True):
        update(buffer, (int(slot) * L + 1, int(number), 10.0 * number))
    disk.state = buffer.state(0.0)
    disk.segments = [segment for segment in disk.segments[1:] if segment[0] not in missing]
    left = [number for number in range(2, 6) if number not in missing]
    for _ in range(3):  # a second start finds the same gaps, and a state that knows how they were closed
        restored = disk.restored()
        run = restored.segments_since(0, 99)
        assert [body[0] for body in run.bodies] == left
        assert run.generations.tolist() == list(range(6 - len(left), 6))
        assert [leaf(restored, slot * L + 1) for slot in run.ring_slots] == [10.0 * number for number in left]
        assert (restored.inserted_segments, restored.size_segments) == (5, len(left))
        assert restored.oldest_insertion_id == (left[0] if left else 6)
        disk.state = restored.state(0.0)
    live = deque(left, maxlen=4)
    for number in range(6, 12):
        restored.insert(bytes([number]), priorities_at(f1=1.0), 0.0)
        live.append(number)
        check_buffer(restored)
        assert [body[0] for body in restored.segments_since(0, 99).bodies] == list(live)


def test_restored_priorities_are_the_maximum_if_new_ones_are() -> None:
    disk, buffer = Disk(), ReplayBuffer(SPEC, 36, 1.0, np.random.default_rng(0), from_actors=False)
    disk.insert(buffer, b"a", priorities_at(f1=70.0)["priority"], 0.0)
    update(buffer, (1, 1, 5.0))
    disk.state = buffer.state(0.0)
    disk.insert(buffer, b"b", priorities_at(f2=70.0)["priority"], 0.0)
    restored = ReplayBuffer(SPEC, 36, 1.0, np.random.default_rng(0), from_actors=False)
    disk.restore(restored, 0.0)
    assert (leaf(restored, 1), leaf(restored, L + 2), restored.max_priority) == (5.0, 5.0, 5.0)
