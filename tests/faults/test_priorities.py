"""Faults of messages to the replay: duplicate or late segments, stale, invalid or malformed priorities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from apex_jax.replay.importance_weights import importance_weights
from apex_jax.replay.sum_tree import SumTree
from apex_jax.transport import wire
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    ActorWelcome,
    Credit,
    PriorityUpdate,
    Rejoin,
    SegmentAck,
)
from apex_jax.types import PEER_TIMEOUT_SECONDS
from tests.rigs.experience_link import Link as ExperienceLink
from tests.rigs.experience_link import join, message_of
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, Peer
from tests.rigs.sampling_link import CAPACITY, L, Link, Server, hello_of
from tests.rigs.validity import check_buffer, check_tree

FIRST = SPEC.frame_stack - 1  # frame slot of a segment's first transition


def full_server(sampling: Link) -> tuple[Server, Peer]:
    server = sampling.server()
    server.insert(CAPACITY + 1)  # the first has been overwritten
    return server, sampling.peer(server, hello_of(1))


def update_of(indices: Any, generations: Any, priorities: Any) -> PriorityUpdate:
    return PriorityUpdate(
        np.array(indices, np.int32), np.array(generations, np.uint32), np.array(priorities, np.float32)
    )


def leaves_of(server: Server) -> np.ndarray:
    return server.buffer.state(0.0).leaves.ravel()


def leaf(server: Server, index: int) -> float:
    return float(leaves_of(server)[index])


# Segments ---------------------------------------------------------------------------------------------------------


def test_fault_03_reconnected_actor_keeps_its_places_and_its_old_connection_is_ignored(
    experience: ExperienceLink,
) -> None:
    server = experience.server()
    half_open, back = experience.peer(server), experience.peer(server)
    before = join(half_open, 1)
    join(experience.peer(server), 2)
    half_open.send(message_of(1))
    half_open.receive(SegmentAck)
    welcome = join(back, 1)
    assert len(server.service.actors) == 2
    assert welcome.actor_number == before.actor_number
    assert welcome.ladder_indices.tolist() == before.ladder_indices.tolist()
    half_open.send(message_of(2))
    half_open.receive(Rejoin)
    assert server.stored() == [1]
    assert back.receive(SegmentAck).sequence == 1
    back.send(message_of(2))
    assert back.receive(SegmentAck).sequence == 2
    assert server.stored() == [1, 2]


def test_fault_34_duplicated_and_reordered_segments_are_stored_once_in_order_and_counted(
    experience: ExperienceLink,
) -> None:
    rng = np.random.default_rng(0)
    server = experience.server()
    peer = experience.peer(server, peer_id=1)
    acknowledged = 0
    while acknowledged < 30:
        first = acknowledged + 1
        numbers = np.repeat(np.arange(first, min(31, first + 3)), 2)
        if rng.random() < 0.5:
            numbers = rng.permutation(numbers)
        peer.send(*(message_of(int(number)) for number in numbers), ActorStatus(0.0, 0))
        answer: Any = None
        while not isinstance(answer, Rejoin) and acknowledged < numbers.max():
            answer = peer.receive(object)
            acknowledged = max(acknowledged, getattr(answer, "sequence", 0))
        if isinstance(answer, Rejoin):  # one was missing before another: the actor sends all again
            peer.send(ActorHello(1, CONFIG.compatibility_key, 4, acknowledged=acknowledged))
            while not isinstance(peer.receive(object), ActorWelcome):
                pass
            acknowledged = max(acknowledged, len(server.stored()))
    assert server.stored() == list(range(1, 31))
    assert server.dropped["early_segment"] > 0
    assert server.dropped["duplicate_segment"] > 0
    assert server.replay.ledger.steps == 300
    assert server.replay.ledger.totals()["stored"] == 30 * TRANSITIONS


# Priorities -------------------------------------------------------------------------------------------------------


def test_fault_20_a_priority_of_a_slot_that_was_overwritten_is_ignored_and_counted(sampling: Link) -> None:
    server, peer = full_server(sampling)
    before = leaf(server, FIRST)
    peer.send(update_of([FIRST, L + FIRST], [1, 2], [900.0, 500.0]))
    server.until(lambda: server.dropped["stale_priority"] == 1)
    assert leaf(server, FIRST) == before
    assert leaf(server, L + FIRST) == pytest.approx(500.0**0.6)


def test_fault_21_invalid_priorities_are_refused_one_by_one(sampling: Link) -> None:
    server, peer = full_server(sampling)
    bad, good = [np.nan, np.inf, -np.inf, -1.0, 0.0], [1e-45, 3.4e38, 2.0]  # a denormal, and the largest there is
    signalling_nan = np.array([0x7F800001], np.uint32).view(np.float32)
    priorities = np.concatenate([signalling_nan, np.array(bad + good, np.float32)])
    ladder_indices = [2 * L + FIRST, 3 * L + FIRST, 4 * L + FIRST]
    peer.send(update_of([L + FIRST] * 6 + ladder_indices, [2] * 6 + [3, 4, 5], priorities))
    server.until(lambda: server.dropped["invalid_priority"] == 6)
    assert leaf(server, 4 * L + FIRST) == pytest.approx(2.0**0.6)
    assert np.isfinite(server.buffer.tree.total)
    assert 0 < leaf(server, ladder_indices[0]) < 1e-15
    assert 1e17 < leaf(server, ladder_indices[1]) < np.inf
    check_buffer(server.buffer)


def test_fault_22_invalid_indices_and_mismatched_arrays_change_nothing(sampling: Link) -> None:
    server, peer = full_server(sampling)
    before = leaves_of(server).copy()
    peer.send(update_of([-1, CAPACITY * L, 2**31 - 1, 0], [2, 2, 2, CAPACITY + 1], [1.0] * 4))
    server.until(lambda: server.dropped["invalid_priority"] == 4)
    sound = [bytes(frame) for frame in wire.encode(update_of([L + FIRST], [2], [9.0]))]
    for wrong in ([*sound[:3], b""], sound[:3], [*sound, b""], [sound[0], sound[1] * 2, *sound[2:]]):
        peer.send_frames(*wrong)
    server.until(lambda: server.dropped["bad_shape"] + server.dropped["wrong_frames"] == 4)
    np.testing.assert_array_equal(leaves_of(server), before)
    peer.send_frames(*sound)
    server.until(lambda: leaf(server, L + FIRST) == pytest.approx(9.0**0.6))


def test_fault_23_last_value_of_duplicate_indices_counts_and_the_sums_are_right(sampling: Link) -> None:
    server, peer = full_server(sampling)
    peer.send(update_of([L + FIRST] * 3 + [2 * L + FIRST], [2, 2, 2, 3], [5.0, 7.0, 3.0, 4.0]))
    server.until(lambda: leaf(server, 2 * L + FIRST) == pytest.approx(4.0**0.6))
    assert leaf(server, L + FIRST) == pytest.approx(3.0**0.6)
    assert server.buffer.tree.total == pytest.approx(leaves_of(server).sum(), rel=1e-12)
    check_buffer(server.buffer)


def test_fault_24_weights_of_the_smallest_beside_the_largest_priority_are_finite(sampling: Link) -> None:
    server = sampling.server()
    server.insert(1)
    buffer, starts = server.buffer, np.arange(FIRST, FIRST + TRANSITIONS)
    extremes = np.where(np.arange(TRANSITIONS) % 2, np.finfo(np.float32).tiny, np.finfo(np.float32).max)
    assert buffer.update_priorities(starts, np.ones(TRANSITIONS, int), extremes).applied == TRANSITIONS
    for priorities in (extremes, np.zeros(TRANSITIONS)):  # zeros are raised to the floor
        buffer.update_priorities(starts, np.ones(TRANSITIONS, int), priorities)
        draw = buffer.sample(64, 32, 0.0)
        assert np.isin(draw.indices, starts).all()
        weights = importance_weights(draw.probabilities.reshape(64, 32), 0.4)
        assert np.isfinite(weights).all()
        assert (weights.max(axis=1) == 1.0).all()
        assert (weights >= 0.0).all()


@pytest.mark.long
def test_fault_25_ten_million_random_updates_leave_no_drift() -> None:
    rng = np.random.default_rng(0)
    tree = SumTree(2**16)
    for _ in range(1_000):
        leaves = rng.integers(2**16, size=10_000)
        tree.set(leaves, rng.random(10_000) ** 4 * 10.0 ** rng.integers(-6, 7))
    exact = float(np.sum(tree.leaves, dtype=np.longdouble))
    assert abs(tree.total - exact) <= 1e-9 * exact
    check_tree(tree)


def test_fault_37_priorities_and_credit_of_other_peers_than_the_learner_change_nothing(sampling: Link) -> None:
    server, before = full_server(sampling)
    server.service.evict_dead_peers(PEER_TIMEOUT_SECONDS + 0.1)  # it was frozen, say
    learner = sampling.peer(server, hello_of(2))
    leaves, largest = leaves_of(server).copy(), server.buffer.max_priority
    before.send(update_of([L + FIRST], [2], [900.0]), Credit(9, 1))
    for _ in range(2):
        before.receive(Rejoin)
    assert server.service.learner is not None
    assert server.service.learner.draws_credit == 0
    np.testing.assert_array_equal(leaves_of(server), leaves)
    assert server.buffer.max_priority == largest
    assert +server.dropped == {}
    learner.send(update_of([L + FIRST], [2], [500.0]))
    server.until(lambda: leaf(server, L + FIRST) == pytest.approx(500.0**0.6))
