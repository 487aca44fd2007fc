"""Several replay servers are drawn from as if they were one; one that is lost, silent or stopped is drawn around."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from apex_jax.host.errors import RunError
from apex_jax.links.replay_servers import Batches, Merged, Plan, ReplayServers, merge
from apex_jax.links.sampling_client import Received, Segments
from apex_jax.replay.buffer import ReplayBuffer
from apex_jax.replay.fractions import MIN_PROBABILITY, counts_of, fractions_of, importance_weights
from apex_jax.replay.rate_limiter import RateLimiter
from apex_jax.run.identity import RunIdentity
from apex_jax.transport.messages import IndexBatches, LearnerHello
from apex_jax.types import MAX_SERVERS
from tests.rigs.buffers import L as BUFFER_L
from tests.rigs.buffers import buffer_of, columns_of
from tests.rigs.links import SPEC, TRANSITIONS, free_address, free_limiter, highest, wait_until
from tests.rigs.sampling_link import CAPACITY, B, K, L, Server, hello_of
from tests.rigs.validity import check_buffer

BETA = 0.4

# Statistics -------------------------------------------------------------------------------------------------------


def filled_buffers(count: int, alpha: float, rng: np.random.Generator) -> list[ReplayBuffer]:
    """Buffers of different contents, whose sums of priorities differ up to a thousandfold."""
    buffers = []
    for number in range(count):
        buffer = buffer_of(alpha=alpha, seed=number)
        scale = 1000.0 ** (number / max(1, count - 1)) if alpha else 1.0
        for _ in range(1 + number % 3):
            priority = (rng.random(BUFFER_L) + 0.2) * scale ** (1 / alpha)
            buffer.insert(b"", columns_of(priority), 0.0)
        buffers.append(buffer)
    return buffers


def drawn_from(buffers: list[ReplayBuffer], batches: int, size: int, rng: np.random.Generator) -> Merged:
    fractions = fractions_of(np.array([buffer.tree.total for buffer in buffers]))
    plan = Plan(fractions, counts_of(fractions, size, rng.random(batches)))
    for number, buffer in enumerate(buffers):
        draw = buffer.sample(plan.counts[:, number], 0.0)
        content = IndexBatches(
            draw.indices,
            draw.generations,
            draw.probabilities,
            buffer.tree.total,
            buffer.size_transitions,
            allowed_samples=1,
            replay_id="",
            environment_steps=0,
            samples_per_insert=1.0,
            age_seconds=draw.age_seconds,
        )
        plan.answers[number] = Received(content, epoch=1)
    return merge(plan, BETA, stride=4 * BUFFER_L)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_frequencies_and_weights_are_those_of_one_server_with_the_same_content(count: int) -> None:
    rng, batches, size = np.random.default_rng(count), 6000, 32
    buffers = filled_buffers(count, 0.6, rng)
    powers = np.concatenate([buffer.tree.leaves[: 4 * BUFFER_L] for buffer in buffers])
    totals = [buffer.tree.total for buffer in buffers]
    assert count == 1 or max(totals) > 300 * min(totals)
    merged = drawn_from(buffers, batches, size, rng)
    assert isinstance(merged.content, Batches)
    indices = merged.content.indices
    expected = batches * size * powers / powers.sum()
    counts, stored = np.bincount(indices.ravel(), minlength=powers.size), powers > 0
    assert not counts[~stored].any()
    chi_square = ((counts - expected)[stored] ** 2 / expected[stored]).sum()
    assert chi_square < stored.sum() + 5 * np.sqrt(2 * stored.sum())
    np.testing.assert_allclose(merged.content.weights, importance_weights(powers[indices], BETA), rtol=1e-6)
    assert (merged.content.weights.max(axis=1) == 1.0).all(), "over the merged batch"


# Real servers -----------------------------------------------------------------------------------------------------


class Fleet:
    """Several servers that serve only while a test waits, and a learner's model of its frame store."""

    def __init__(self, count: int) -> None:
        self.addresses = tuple(free_address() for _ in range(count))
        self.servers: dict[int, Server] = {}
        self.context = zmq.Context()
        self.stream: ReplayServers | None = None
        self.ring = np.zeros(count * CAPACITY, np.int64)

    def serve(self) -> None:
        for server in self.servers.values():
            server.serve()

    def start(self, index: int, segments: int, limiter: RateLimiter | None = None) -> Server:
        self.servers[index] = Server(self.addresses[index], limiter or free_limiter(), index=index)
        self.servers[index].insert(segments)
        return self.servers[index]

    def kill(self, index: int) -> None:
        self.servers.pop(index).close()

    def join(self, groups: int = 2, hello: LearnerHello | None = None, **options: Any) -> ReplayServers:
        rng, hello = np.random.default_rng(0), hello or hello_of()
        self.stream = ReplayServers(self.context, self.addresses, SPEC, hello, CAPACITY, groups, BETA, rng, **options)
        return self.stream

    def consume(self) -> Merged | None:
        """Consumes one item like the learner; returns it if it is one of batches, whose segments it checks."""
        assert self.stream is not None
        merged = self.stream.next(0.0)
        if merged is None:
            return None
        if isinstance(merged.content, Segments):
            self.ring[merged.content.ring_slots] = merged.content.frames[:, 0, 0].astype(int)
        else:
            assert merged.content.indices.shape == merged.content.weights.shape == (K, B)
            for part in merged.parts:
                assert isinstance(part.item.content, IndexBatches)
                slots = merged.content.indices.ravel()[part.where] // L
                assert (slots // CAPACITY == part.server).all()
                np.testing.assert_array_equal(self.ring[slots], part.item.content.generations)
        self.stream.consumed(merged)
        return None if isinstance(merged.content, Segments) else merged

    def batches(self, accepted: Callable[[Merged], bool] = lambda merged: True) -> Merged:
        """Serves and consumes until such batches come."""
        found: list[Merged] = []

        def turn() -> None:
            self.serve()
            merged = self.consume()
            found.extend([merged] if merged is not None and accepted(merged) else [])

        wait_until(lambda: found, turn)
        return found[0]

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.context.term()
        for server in self.servers.values():
            server.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with contextlib.closing(Fleet(3)) as fleet:
        yield fleet


def proposal(run: str) -> LearnerHello:
    """The hello of a learner that begins a run, and proposes this identity for it."""
    return hello_of()._replace(run_identity=run, is_new_run=True)


def test_first_server_names_a_new_run_for_all_even_if_the_learner_dies_in_between(fleet: Fleet) -> None:
    first, others = fleet.start(0, 1), [fleet.start(index, 1) for index in (1, 2)]
    first.service.run_identity.name = "a" * 16  # the proposal of a learner that was killed before its welcome
    run = RunIdentity()
    stream = fleet.join(hello=proposal("b" * 16), run=run)
    for other in others * 20:
        other.service._socket.poll(10)
        other.serve()
    assert [other.service.run_identity.name for other in others] == ["", ""]
    wait_until(lambda: stream.peer_states == ["joined"] * 3, fleet.serve)
    assert {run.name, *(server.service.run_identity.name for server in fleet.servers.values())} == {"a" * 16}


def of(*servers: int) -> Callable[[Merged], bool]:
    return lambda merged: {part.server for part in merged.parts} == set(servers)


@pytest.mark.parametrize("seed", range(3))
def test_frame_store_is_what_each_server_was_when_it_drew(fleet: Fleet, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for index in range(3):
        fleet.start(index, segments=2 * index)
    stream, last = fleet.join(), None
    for _ in range(300):
        index = int(rng.integers(3))
        operation = rng.integers(4)
        if operation == 0:
            fleet.servers[index].insert(int(rng.integers(1, CAPACITY)))
        elif operation == 1:
            fleet.servers[index].serve()
        elif (merged := fleet.consume()) is not None:
            last = merged
        elif last is not None:
            stream.update_priorities(last, rng.random((K, B), np.float32))
    fleet.batches(of(0, 1, 2))
    for server in fleet.servers.values():
        check_buffer(server.buffer)
        assert not server.dropped["invalid_priority"]
    assert not stream.dropped


def test_priorities_go_to_the_server_of_each_transition(fleet: Fleet) -> None:
    for index in range(3):
        fleet.start(index, segments=3)
    stream = fleet.join()
    merged = fleet.batches(of(0, 1, 2))
    priorities = np.zeros(K * B, np.float32)
    for part in merged.parts:
        priorities[part.where] = 10.0 * (part.server + 1)
    stream.update_priorities(merged, priorities.reshape(K, B))
    for part in merged.parts:
        content, buffer = part.item.content, fleet.servers[part.server].buffer
        assert isinstance(content, IndexBatches)
        expected = (10.0 * (part.server + 1)) ** 0.6
        wait_until(
            lambda tree=buffer.tree, at=content.indices, power=expected: np.allclose(tree.get(at), power),  # type: ignore[misc]
            fleet.serve,
        )


def test_lost_server_is_drawn_around_and_drawn_from_again_once_it_may_be(fleet: Fleet) -> None:
    for index in range(3):
        fleet.start(index, segments=3)
    stream = fleet.join(groups=4)
    fleet.batches(of(0, 1, 2))
    fleet.kill(1)
    for _ in range(20):
        fleet.batches(of(0, 2))
    server = fleet.start(1, segments=0, limiter=free_limiter(min_size=2 * TRANSITIONS))
    wait_until(lambda: stream.peer_states == ["joined"] * 3, fleet.serve)
    assert stream.disconnects == 1
    server.insert(1)
    for _ in range(20):
        fleet.batches(of(0, 2))
    server.insert(1)
    fleet.batches(of(0, 1, 2))


def indices_of(merged: Merged) -> np.ndarray:
    assert isinstance(merged.content, Batches)
    return merged.content.indices


def test_each_device_has_its_part_of_every_batch_from_its_own_servers_or_all_wait() -> None:
    with contextlib.closing(Fleet(4)) as fleet:
        for index in range(4):
            fleet.start(index, segments=1 + index)
        stream = fleet.join(devices=2)
        for _ in range(10):
            indices = indices_of(fleet.batches())
            server = indices.reshape(K, 2, B // 2) // (L * CAPACITY)
            np.testing.assert_array_equal(server // 2, np.broadcast_to([[[0], [1]]], server.shape))
        fleet.kill(3)
        of_second = indices_of(fleet.batches(of(0, 1, 2)))[:, B // 2 :]
        assert set((of_second // (L * CAPACITY)).ravel()) == {2}
        fleet.kill(2)  # the last one of the second device
        wait_until(lambda: stream.peer_states[2:].count("joined") == 0, fleet.consume)
        assert all(fleet.consume() is None for _ in range(20)), "the first device does not learn alone"
        fleet.start(3, segments=2)
        fleet.batches(of(0, 1, 3))


def test_server_that_its_rate_limiter_stops_does_not_stop_the_learner(fleet: Fleet) -> None:
    sampled: RateLimiter = RateLimiter(1, 1.0, 200.0)
    fleet.start(0, segments=3)
    stopped = fleet.start(1, segments=3, limiter=sampled)
    fleet.start(2, segments=3)
    fleet.join()
    fleet.batches(of(0, 2))
    drawn = sampled.sampled
    assert drawn <= 3 * TRANSITIONS + 200, "it is not drawn from more often than it allows"
    for _ in range(20):
        fleet.batches(of(0, 2))
    assert sampled.sampled == drawn
    stopped.insert(20)
    fleet.batches(of(0, 1, 2))


def test_learning_begins_at_the_minimum_size_of_all_servers_together(fleet: Fleet) -> None:
    fleet.start(0, segments=2)
    fleet.start(1, segments=1)
    third = fleet.start(2, segments=0, limiter=free_limiter(min_size=2 * TRANSITIONS))
    fleet.join(min_size_to_sample=4 * TRANSITIONS)
    for _ in range(50):
        fleet.serve()
        assert fleet.consume() is None
    third.insert(1)
    fleet.batches(of(0, 1))


def test_learner_ends_in_one_line_once_all_servers_have_been_away_for_the_limit(fleet: Fleet) -> None:
    fleet.start(0, segments=3)
    stream = fleet.join(away_limit_seconds=0.5)
    fleet.batches(of(0))
    until = time.monotonic() + 0.7
    while time.monotonic() < until:
        fleet.batches(of(0))  # two of three have never been here
    fleet.kill(0)
    with pytest.raises(RunError, match=r"all replay servers have been away for \d s: start them, or raise away_limit"):
        wait_until(lambda: stream.next(0.5) and stream.disconnects > 1)


def test_addresses_in_another_order_than_the_servers_are_refused_in_one_line(fleet: Fleet) -> None:
    fleet.start(0, segments=1)
    fleet.addresses = (fleet.addresses[1], fleet.addresses[0], fleet.addresses[2])
    stream = fleet.join()
    with pytest.raises(RunError, match=r"replay\.index=0, the learner expects number 1 at this place") as caught:
        wait_until(lambda: stream.next(0.0), fleet.serve)
    assert str(caught.value).isprintable()


# Fractions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("totals", "groups", "fractions"), [
    ([5.0], 1, [1.0]),
    ([1.0, 3.0], 1, [0.25, 0.75]),
    ([1.0, 0.0, 3.0], 1, [0.25, 0.0, 0.75]),
    ([1.0, 1000.0], 2, [0.5, 0.5]),
    ([1.0, 3.0, 8.0, 0.0], 2, [0.125, 0.375, 0.5, 0.0]),  # servers 0 and 1 are a group
])  # fmt: skip
def test_fractions_are_in_proportion_within_a_group_and_equal_between_groups(
    totals: list[float], groups: int, fractions: list[float]
) -> None:
    np.testing.assert_allclose(fractions_of(np.array(totals), groups), fractions)


def test_weights_are_finite_for_the_most_extreme_numbers_that_servers_may_send() -> None:
    totals = np.full(MAX_SERVERS, highest(IndexBatches, "total_priority"))
    probabilities = MIN_PROBABILITY * fractions_of(totals)
    assert importance_weights(probabilities[None], 10.0).tolist() == [[1.0] * MAX_SERVERS]


def test_counts_are_the_fractions_rounded_and_sum_up_to_the_batch() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        fractions = rng.dirichlet(np.full(int(rng.integers(1, 9)), 0.3))
        size = int(rng.integers(1, 600))
        counts = counts_of(fractions, size, rng.random(7))
        assert counts.shape == (7, len(fractions))
        assert counts.dtype == np.int32
        assert (counts.sum(axis=1) == size).all()
        assert (np.abs(counts - fractions * size) < 1 + 1e-6).all()


def test_expected_count_is_exactly_the_share_of_the_batch() -> None:
    """Over a grid of uniforms, the mean of a count is its expectation."""
    fractions = np.array([0.0004, 0.1003, 0.6, 0.2993])
    uniforms = (np.arange(10_000) + 0.5) / 10_000
    np.testing.assert_allclose(counts_of(fractions, 512, uniforms).mean(axis=0), fractions * 512, atol=1e-3)


def test_each_group_gives_exactly_its_part_of_every_batch() -> None:
    """As the update on several devices requires, however its part is divided among the servers of the group."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        groups, servers, part = (int(each) for each in rng.integers(1, 6, size=3))
        totals = rng.random(groups * servers) * 10.0 ** rng.integers(-4, 5, groups * servers)
        counts = counts_of(fractions_of(totals, groups), groups * part, rng.random(9))
        assert (counts.reshape(9, groups, servers).sum(axis=2) == part).all()


def test_weights_are_those_of_the_paper_over_the_largest_of_the_batch() -> None:
    probabilities = np.random.default_rng(3).random((3, 8)) + 1e-3
    weights = (1000 * probabilities) ** -0.4
    expected = weights / weights.max(axis=1, keepdims=True)
    np.testing.assert_allclose(importance_weights(probabilities, 0.4), expected, rtol=1e-6)
    assert importance_weights(probabilities, 0.0).tolist() == np.ones((3, 8)).tolist()
