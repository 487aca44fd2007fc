"""The replay server welcomes, refuses and evicts actors, and gives each of them ladder indices and an actor number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from apex_jax.links import experience_server, membership
from apex_jax.links.membership import MAX_ACTOR_NUMBER
from apex_jax.transport.messages import ActorHello, ActorStatus, ActorWelcome, Goodbye, Rejoin, SegmentAck
from apex_jax.types import PEER_TIMEOUT_SECONDS
from tests.rigs.experience_link import CREDIT, KEY, Link, join, link, message_of
from tests.rigs.links import CONFIG

__all__ = ["link"]


def test_each_actor_is_welcomed_with_ladder_indices_of_its_own(link: Link) -> None:
    server = link.server()
    first, second = join(link.peer(server), 1), join(link.peer(server), 2)
    assert (first.actor_number, second.actor_number) == (1, 2)
    assert sorted([*first.ladder_indices, *second.ladder_indices]) == list(range(8))
    assert (first.ladder_size, first.max_outstanding_segments) == (8, CREDIT)


def test_a_silent_actor_is_evicted_and_its_ladder_indices_go_to_the_next(link: Link) -> None:
    server = link.server()
    silent, alive = link.peer(server), link.peer(server)
    ladder_indices = join(silent, 1).ladder_indices
    join(alive, 2)
    server.now_seconds = PEER_TIMEOUT_SECONDS
    alive.send(ActorStatus(2, 5.0, 7))
    server.until(lambda: any(actor.status.weights_version == 7 for actor in server.service.actors.values()))
    server.service.evict_dead_peers(PEER_TIMEOUT_SECONDS)
    assert len(server.service.actors) == 2
    server.service.evict_dead_peers(PEER_TIMEOUT_SECONDS + 0.1)
    assert [actor.peer_id for actor in server.service.actors.values()] == [2]
    assert join(link.peer(server), 3).ladder_indices.tolist() == ladder_indices.tolist()


def test_goodbye_frees_the_ladder_indices_at_once(link: Link) -> None:
    server = link.server()
    stream = link.stream()
    server.until(lambda: stream.wait_for_welcome(0))
    welcome = stream.wait_for_welcome(0)
    assert welcome is not None
    stream.close()
    server.until(lambda: not server.service.actors)
    assert join(link.peer(server), 2).ladder_indices.tolist() == welcome.ladder_indices.tolist()


def test_an_actor_that_reconnects_keeps_its_ladder_indices(link: Link) -> None:
    server = link.server()
    before = join(link.peer(server), 1)
    join(link.peer(server), 2)
    after = join(link.peer(server), 1)
    assert (after.actor_number, after.ladder_indices.tolist()) == (before.actor_number, before.ladder_indices.tolist())
    assert len(server.service.actors) == 2


def test_a_repeated_hello_is_welcomed_once(link: Link) -> None:
    server = link.server()
    peer = link.peer(server, peer_id=1)
    peer.send(ActorHello(1, CONFIG.compatibility_key, 4))
    assert peer.receives_nothing()
    assert len(server.service.actors) == 1


def test_a_new_peer_id_on_a_connection_frees_the_ladder_indices_of_the_previous_one(link: Link) -> None:
    server = link.server()
    peer = link.peer(server)
    first, *_ = [join(peer, peer_id) for peer_id in range(1, 10)]
    assert len(server.service.actors) == 1
    peer.send(Goodbye(9))
    server.until(lambda: not server.service.actors)
    assert join(link.peer(server), 10).ladder_indices.tolist() == first.ladder_indices.tolist()


def test_a_restarted_server_accepts_the_ladder_indices_and_the_actor_number_of_an_actor(link: Link) -> None:
    first = link.server()
    streams = [link.stream(peer_id) for peer_id in (1, 2)]
    first.until(lambda: all(stream.wait_for_welcome(0) for stream in streams))
    welcomes: list[Any] = [stream.wait_for_welcome(0) for stream in streams]
    first.close()
    second = link.server()
    newcomer = join(link.peer(second), 3)
    second.until(lambda: len(second.service.actors) == 3)
    for actor in second.service.actors.values():
        if actor.peer_id != 3:
            welcome = welcomes[actor.peer_id - 1]
            assert (actor.actor_number, [*actor.ladder_indices]) == (welcome.actor_number, [*welcome.ladder_indices])
    assert sorted(actor.actor_number for actor in second.service.actors.values() if actor.peer_id != 3) == [1, 2]
    assert newcomer.ladder_size == 8
    assert join(link.peer(second), 4).actor_number == 3


def test_new_actor_numbers_are_above_those_of_rejoining_actors(link: Link) -> None:
    peer = link.peer(server := link.server())
    peer.send(ActorHello(1, KEY, 4, actor_number=41, ladder_indices=np.array([1, 3, 5, 7], np.int32)))
    welcome = peer.receive(ActorWelcome)
    assert (welcome.actor_number, welcome.ladder_indices.tolist()) == (41, [1, 3, 5, 7])
    newcomer = join(link.peer(server), 2)
    assert (newcomer.actor_number, newcomer.ladder_indices.tolist()) == (42, [0, 2, 4, 6])


def test_a_new_actor_gets_the_ladder_indices_of_a_quiet_one_before_its_eviction(
    link: Link,
) -> None:
    server = link.server()
    living, dead = link.peer(server, peer_id=1), join(link.peer(server), 2)
    server.now_seconds = membership.QUIET_SECONDS + 1.0
    living.send(ActorStatus(1, 0.0, 0))
    assert living.receive(SegmentAck).sequence == 0
    again = join(link.peer(server), 3)
    assert len(server.service.actors) == 3, "the dead one is not forgotten yet"
    assert again.ladder_indices.tolist() == dead.ladder_indices.tolist()
    assert again.actor_number == 3


@pytest.mark.parametrize("ladder_indices", [[0, 1, 2], [0, 1, 2, 8], [-1, 0, 1, 2], []])
def test_ladder_indices_outside_the_ladder_are_replaced(link: Link, ladder_indices: list[int]) -> None:
    peer = link.peer(link.server())
    peer.send(ActorHello(1, KEY, 4, actor_number=5, ladder_indices=np.array(ladder_indices, np.int32)))
    welcome = peer.receive(ActorWelcome)
    assert (welcome.actor_number, welcome.ladder_indices.tolist()) == (5, [0, 2, 5, 7])


@pytest.mark.parametrize(("claim", "given"), [
    (MAX_ACTOR_NUMBER, MAX_ACTOR_NUMBER),
    (MAX_ACTOR_NUMBER + 1, 1),  # not accepted
    (2**48, 1),  # the largest of a message
])  # fmt: skip
def test_after_the_largest_claimed_actor_number_later_ones_still_fit_in_a_message(
    link: Link, claim: int, given: int
) -> None:
    server = link.server()
    peer = link.peer(server)
    peer.send(ActorHello(1, KEY, 4, actor_number=claim, ladder_indices=np.arange(4, dtype=np.int32)))
    assert peer.receive(ActorWelcome).actor_number == given
    second = join(link.peer(server), 2)
    assert second.actor_number == given + 1, "a number that fits the protocol"
    server.close()
    peer = link.peer(again := link.server())  # which knows of nobody
    peer.send(ActorHello(2, KEY, 4, actor_number=second.actor_number, ladder_indices=second.ladder_indices))
    highest_actor_number = [peer.receive(ActorWelcome).actor_number, join(link.peer(again), 3).actor_number]
    assert highest_actor_number[1] == highest_actor_number[0] + 1


def test_an_actor_beyond_the_limit_is_refused_and_retries(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(experience_server, "MAX_ACTORS", 1)
    server = link.server()
    peer = link.peer(server, peer_id=1)
    stream = link.stream(peer_id=2)
    server.until(lambda: stream.dropped["refused"] >= 3)
    assert not stream.finished.is_set()
    assert [record.getMessage() for record in caplog.records] == [
        "the replay server has the 1 actors it can have; use fewer, of more environments each;"
        " retrying until it has a place"
    ]
    join(link.peer(server), 1)  # reconnects: it is no other
    server.service._remove(next(iter(server.service.actors)))
    server.until(lambda: stream.wait_for_welcome(0))
    peer.send(message_of(1))
    peer.receive(Rejoin)
