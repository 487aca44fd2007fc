"""Specification of `apex_jax.links.membership`: who is connected, and whose segment is stored next."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from apex_jax.links.membership import ActorPeer, Membership, Waiting
from apex_jax.transport.messages import ActorHello, ActorStatus
from apex_jax.types import SegmentRecord

LADDER, MOST_LEFT_BEHIND = 8, 12


def actor_of(peer_id: int) -> ActorPeer:
    return ActorPeer(peer_id, peer_id, np.array([peer_id % LADDER], np.int32), ActorStatus(peer_id, 0.0, 0), received=0)


def waiting_of(actor: ActorPeer) -> Waiting:
    actor.received += 1
    return Waiting(SegmentRecord(actor.peer_id, actor.received, 0, 1, b"", 0), None, "refused")


def turns(membership: Membership) -> list[int]:
    """The peer ids whose segments are stored, in their order, until none waits."""
    order = []
    while (waiting := membership.next_waiting()) is not None:
        order.append(waiting.segment.peer_id)
        membership.dequeue()
    return order


@pytest.mark.parametrize("seed", range(20))
def test_every_segment_is_stored_once_and_in_its_actors_order_unless_it_was_left_behind(seed: int) -> None:
    rng, membership = np.random.default_rng(seed), Membership(LADDER, MOST_LEFT_BEHIND)
    known = {peer_id: actor_of(peer_id) for peer_id in range(1, 9)}
    expected: defaultdict[int, list[int]] = defaultdict(list)
    stored: defaultdict[int, list[int]] = defaultdict(list)
    discarded = 0
    for step in range(400):
        peer_id = int(rng.integers(1, 9))
        actor, connection = known[peer_id], membership.connection_of(peer_id)
        choice = rng.random()
        if choice < 0.25:
            if peer_id not in membership.gone and connection is None:
                actor = known[peer_id] = actor_of(peer_id)  # what was left behind comes again, under the same numbers
                actor.received = max([0, *stored[peer_id]])
                expected[peer_id] = expected[peer_id][: len(stored[peer_id])]
            membership.join(b"%d" % step, actor)
        elif choice < 0.4 and connection is not None:
            before = dict(membership.gone)
            discarded += membership.leave(connection)
            assert sum(len(each.waiting) for each in membership.gone.values()) <= MOST_LEFT_BEHIND
            assert before.keys() - membership.gone.keys() <= before.keys()
        elif choice < 0.75 and connection is not None:
            waiting = waiting_of(actor)
            expected[peer_id].append(waiting.segment.sequence)
            membership.enqueue(actor, waiting)
        elif (next_waiting := membership.next_waiting()) is not None:
            stored[next_waiting.segment.peer_id].append(next_waiting.segment.sequence)
            membership.dequeue()
        assert membership._occupants.sum() == len(membership.actors)
    for peer_id in turns(membership):
        stored[peer_id].append(max([0, *stored[peer_id]]) + 1)
    for peer_id, sequences in stored.items():
        assert sequences == list(range(1, len(sequences) + 1))
        assert sequences == expected[peer_id][: len(sequences)]
    missing = sum(len(expected[peer_id]) - len(stored[peer_id]) for peer_id in known)
    assert 0 <= missing <= discarded
    assert not membership.gone


def test_connected_actors_take_turns_and_those_that_left_share_one_turn() -> None:
    membership = Membership(LADDER, MOST_LEFT_BEHIND)
    for peer_id, segments in ((1, 4), (2, 2), (3, 2), (4, 2)):
        membership.join(b"%d" % peer_id, actor := actor_of(peer_id))
        for _ in range(segments):
            membership.enqueue(actor, waiting_of(actor))
    for peer_id in (3, 4):
        membership.leave(b"%d" % peer_id)
    assert turns(membership) == [1, 2, 3, 1, 2, 3, 1, 4, 1, 4]


def test_an_actor_that_returns_keeps_its_pending_segments_and_its_credit() -> None:
    membership, actor = Membership(LADDER, MOST_LEFT_BEHIND), actor_of(1)
    membership.join(b"a", actor)
    membership.enqueue(actor, waiting_of(actor))
    membership.leave(b"a")
    assert membership.gone == {1: actor}
    membership.join(b"b", actor)
    assert (membership.gone, membership.connection_of(1), actor.stored) == ({}, b"b", 0)
    assert turns(membership) == [1]
    assert actor.stored == 1


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_servers_assign_different_actor_numbers_and_places_that_span_the_ladder(servers: int) -> None:
    ladder = 24
    places: list[int] = []
    highest_actor_number: list[int] = []
    for index in range(servers):
        membership, newest = Membership(ladder, MOST_LEFT_BEHIND, index, servers), 0
        for peer_id in range(1, 24 // servers // 4 + 1):
            hello = ActorHello(peer_id, "", num_environments=4)
            newest, ladder_indices = membership.choose(hello, newest, 0.0)
            actor = ActorPeer(peer_id, newest, ladder_indices, ActorStatus(peer_id, 0.0, 0), received=0)
            membership.join(b"%d" % peer_id, actor)
            highest_actor_number.append(newest)
            places += ladder_indices.tolist()
            assert ladder_indices.min() < ladder / 3
            assert ladder_indices.max() >= ladder * 2 / 3
    assert sorted(places) == list(range(ladder))
    assert len(set(highest_actor_number)) == len(highest_actor_number)
    assert sorted(highest_actor_number) == list(range(1, len(highest_actor_number) + 1))


def test_actor_that_comes_from_another_server_keeps_its_places_under_a_new_actor_number() -> None:
    membership = Membership(LADDER, MOST_LEFT_BEHIND, index=1, servers=2)
    hello = ActorHello(7, "", num_environments=3, ladder_indices=np.array([0, 4, 6], np.int32))
    actor_number, ladder_indices = membership.choose(hello, 5, 0.0)
    assert (actor_number, ladder_indices.tolist()) == (6, [0, 4, 6])
