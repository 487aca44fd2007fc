"""Specification of `apex_jax.links.membership`: who is connected, and whose segment is stored next."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from apex_jax.links.membership import ActorPeer, Membership, Waiting
from apex_jax.transport.messages import ActorHello, ActorStatus
from apex_jax.types import SegmentRecord

LADDER = 8


def actor_of(peer_id: int, received: int = 0) -> ActorPeer:
    ladder_indices = np.array([peer_id % LADDER], np.int32)
    return ActorPeer(peer_id, peer_id, ladder_indices, ActorStatus(peer_id, 0.0, 0), received, b"%d" % peer_id)


def waiting_of(actor: ActorPeer) -> Waiting:
    actor.received += 1
    return Waiting(SegmentRecord(actor.peer_id, actor.received, 0, 1, b"", 0), None, "refused")


def store_next(membership: Membership, stored: dict[int, list[int]]) -> int | None:
    """Stores the next segment; returns the peer id of its actor, None if there is none."""
    waiting = membership.next_waiting()
    if waiting is None:
        return None
    stored[waiting.segment.peer_id].append(waiting.segment.sequence)
    assert membership.dequeue().stored == waiting.segment.sequence
    return waiting.segment.peer_id


@pytest.mark.parametrize("seed", range(20))
def test_every_segment_of_a_connected_actor_is_stored_once_and_in_order(seed: int) -> None:
    rng, membership = np.random.default_rng(seed), Membership(LADDER)
    actors: dict[int, ActorPeer] = {}
    stored: defaultdict[int, list[int]] = defaultdict(list)
    for _ in range(400):
        peer_id, choice = int(rng.integers(1, 9)), rng.random()
        if choice < 0.25 and peer_id not in actors:
            actors[peer_id] = actor_of(peer_id, received=len(stored[peer_id]))  # sends again what was not stored
            membership.join(actors[peer_id])
        elif choice < 0.4 and peer_id in actors:
            membership.leave(actors.pop(peer_id).connection)
        elif choice < 0.75 and peer_id in actors:
            membership.enqueue(actors[peer_id], waiting_of(actors[peer_id]))
        else:
            store_next(membership, stored)
        assert membership.actors.keys() == {actor.connection for actor in actors.values()}
        assert all(actor.stored == len(stored[peer_id]) for peer_id, actor in actors.items())
    while store_next(membership, stored) is not None:
        pass
    assert all(actor.stored == actor.received for actor in actors.values())
    for sequences in stored.values():
        assert sequences == list(range(1, len(sequences) + 1))


def test_connected_actors_take_turns() -> None:
    membership, stored = Membership(LADDER), defaultdict[int, list[int]](list)
    for peer_id, segments in ((1, 4), (2, 2), (3, 3), (4, 1)):
        membership.join(actor := actor_of(peer_id))
        for _ in range(segments):
            membership.enqueue(actor, waiting_of(actor))
    membership.leave(b"3")
    assert [store_next(membership, stored) for _ in range(8)] == [1, 2, 4, 1, 2, 1, 1, None]


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_servers_assign_different_actor_numbers_and_places_that_span_the_ladder(servers: int) -> None:
    ladder = 24
    places: list[int] = []
    actor_numbers: list[int] = []
    for index in range(servers):
        membership, newest = Membership(ladder, index, servers), 0
        for peer_id in range(1, 24 // servers // 4 + 1):
            newest, ladder_indices = membership.choose(ActorHello(peer_id, "", num_environments=4), newest, 0.0)
            membership.join(replace(actor_of(peer_id), ladder_indices=ladder_indices))
            actor_numbers.append(newest)
            places += ladder_indices.tolist()
            assert ladder_indices.min() < ladder / 3
            assert ladder_indices.max() >= ladder * 2 / 3
    assert sorted(places) == list(range(ladder))
    assert sorted(actor_numbers) == list(range(1, len(actor_numbers) + 1))


def test_actor_that_comes_from_another_server_keeps_its_places_under_a_new_actor_number() -> None:
    membership = Membership(LADDER, index=1, servers=2)
    hello = ActorHello(7, "", num_environments=3, ladder_indices=np.array([0, 4, 6], np.int32))
    actor_number, ladder_indices = membership.choose(hello, 5, 0.0)
    assert (actor_number, ladder_indices.tolist()) == (6, [0, 4, 6])
