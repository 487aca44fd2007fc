"""What both ends of the experience link owe each other: signs of life, places kept, each segment once and in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from apex_jax.links import connection, experience_client, experience_server, membership
from apex_jax.links.membership import MAX_INCARNATION
from apex_jax.transport import sockets, wire
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    ActorWelcome,
    Finish,
    LearnerHello,
    Refusal,
    Rejoin,
    SegmentAck,
)
from tests.experience_link import CREDIT, Link, join, limiter_that_lets_in, message_of, put_all
from tests.links import CONFIG, SPEC, TRANSITIONS, segment_of, waiting_in

KEY = CONFIG.compatibility_key


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.02)
    link = Link()
    yield link
    link.close()


# Signs of life ----------------------------------------------------------------------------------------------------


def test_a_sign_of_life_is_answered_with_what_is_stored(link: Link) -> None:
    peer = link.peer(link.server(), run_id=1)
    peer.send(message_of(1))
    assert peer.receive(SegmentAck).sequence == 1
    for _ in range(3):
        peer.send(ActorStatus(1, 0.0, 0))
        assert peer.receive(SegmentAck).sequence == 1


def test_segments_are_answered_also_while_none_is_stored(link: Link) -> None:
    server = link.server(limiter_that_lets_in(1))
    peer = link.peer(server, run_id=1)
    for number in range(1, 4):
        peer.send(message_of(number))
        if number > 1:
            assert peer.hears_nothing()
            server.now_seconds += experience_server.ANSWER_SECONDS
            peer.send(message_of(number))  # once more
        assert peer.receive(SegmentAck).sequence == 1
    assert server.stored() == [1]


def test_a_server_that_has_nothing_to_say_is_not_given_up(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experience_client, "PEER_TIMEOUT_SECONDS", 3.0)
    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.05)
    server = link.server()
    stream = link.stream()
    server.until(lambda: stream.wait_for_welcome(0))
    identities = set(server.service.actors)
    until = time.monotonic() + 5
    server.until(lambda: time.monotonic() > until)
    assert set(server.service.actors) == identities, "on the connection that it had"
    assert stream.disconnects == 0


def test_actors_that_give_up_a_server_which_is_not_ready_are_each_welcomed_once(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they said on connections that are gone is read as well, in any order with the rest."""
    monkeypatch.setattr(experience_client, "PEER_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.1)
    server = link.server()
    streams = [link.stream(run_id) for run_id in (1, 2)]
    streams[0].finished.wait(3)  # nobody serves
    server.until(lambda: all(stream.peer_state == "joined" for stream in streams))
    until = time.monotonic() + 1
    server.until(lambda: time.monotonic() > until)
    assert server.replay.incarnations == 2
    for actor in server.service.actors.values():
        welcome: Any = streams[actor.run_id - 1].wait_for_welcome(0)
        assert (actor.incarnation, [*actor.ladder_indices]) == (welcome.incarnation, [*welcome.ladder_indices])


def test_a_silent_server_is_noticed_said_once_and_noticed_when_it_is_back(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(experience_client, "PEER_TIMEOUT_SECONDS", 0.3)
    caplog.set_level(logging.INFO)
    server = link.server()
    stream = link.stream()
    put_all(stream, range(2), server)
    server.until(lambda: not stream._outbox and stream._outbox._sequence == 2)

    def wait_for_silence() -> None:  # nobody serves meanwhile
        stream.finished.wait(0.1)

    for disconnects in (1, 2):
        while stream.disconnects < disconnects:
            wait_for_silence()
        wait_for_silence()
        assert stream.disconnects == disconnects
        assert stream.peer_state == "lost"
        server.until(lambda: stream.peer_state == "joined")
    said = [record.getMessage() for record in caplog.records if record.name == connection.__name__]
    assert [message.split(" for ")[0].split(" after ")[0] for message in said] == [
        f"the replay server at {link.address} has been silent",
        "the replay server is back",
    ] * 2


# Places -----------------------------------------------------------------------------------------------------------


def test_a_restarted_server_takes_the_places_and_the_incarnation_that_an_actor_has(link: Link) -> None:
    first = link.server()
    streams = [link.stream(run_id) for run_id in (1, 2)]
    first.until(lambda: all(stream.wait_for_welcome(0) for stream in streams))
    welcomes: list[Any] = [stream.wait_for_welcome(0) for stream in streams]
    first.close()
    second = link.server()
    newcomer = join(link.peer(second), 3)
    second.until(lambda: len(second.service.actors) == 3)
    for actor in second.service.actors.values():
        if actor.run_id != 3:
            welcome = welcomes[actor.run_id - 1]
            assert (actor.incarnation, [*actor.ladder_indices]) == (welcome.incarnation, [*welcome.ladder_indices])
    assert sorted(actor.incarnation for actor in second.service.actors.values() if actor.run_id != 3) == [1, 2]
    assert newcomer.ladder_size == 8
    assert join(link.peer(second), 4).incarnation == 3


def test_incarnations_go_on_above_those_that_actors_bring_along(link: Link) -> None:
    peer = link.peer(server := link.server())
    peer.send(ActorHello(1, KEY, 4, incarnation=41, ladder_indices=np.array([1, 3, 5, 7], np.int32)))
    welcome = peer.receive(ActorWelcome)
    assert (welcome.incarnation, welcome.ladder_indices.tolist()) == (41, [1, 3, 5, 7])
    newcomer = join(link.peer(server), 2)
    assert (newcomer.incarnation, newcomer.ladder_indices.tolist()) == (42, [0, 2, 4, 6])


def test_an_actor_that_is_started_again_gets_the_places_of_the_one_that_died_before_that_one_is_forgotten(
    link: Link,
) -> None:
    server = link.server()
    living, dead = link.peer(server, run_id=1), join(link.peer(server), 2)
    server.now_seconds = membership.QUIET_SECONDS + 1.0
    living.send(ActorStatus(1, 0.0, 0))
    assert living.receive(SegmentAck).sequence == 0
    again = join(link.peer(server), 3)
    assert len(server.service.actors) == 3, "the dead one is not forgotten yet"
    assert again.ladder_indices.tolist() == dead.ladder_indices.tolist()
    assert again.incarnation == 3


@pytest.mark.parametrize("ladder_indices", [[0, 1, 2], [0, 1, 2, 8], [-1, 0, 1, 2], []])
def test_places_that_do_not_fit_the_ladder_are_given_anew(link: Link, ladder_indices: list[int]) -> None:
    peer = link.peer(link.server())
    peer.send(ActorHello(1, KEY, 4, incarnation=5, ladder_indices=np.array(ladder_indices, np.int32)))
    welcome = peer.receive(ActorWelcome)
    assert (welcome.incarnation, welcome.ladder_indices.tolist()) == (5, [0, 2, 5, 7])


@pytest.mark.parametrize(("claim", "given"), [
    (MAX_INCARNATION, MAX_INCARNATION),
    (MAX_INCARNATION + 1, 1),  # not believed
    (2**48, 1),  # the largest that a message can say
])  # fmt: skip
def test_the_largest_incarnation_that_an_actor_can_claim_harms_nobody(link: Link, claim: int, given: int) -> None:
    server = link.server()
    peer = link.peer(server)
    peer.send(ActorHello(1, KEY, 4, incarnation=claim, ladder_indices=np.arange(4, dtype=np.int32)))
    assert peer.receive(ActorWelcome).incarnation == given
    second = join(link.peer(server), 2)
    assert second.incarnation == given + 1, "a number that the protocol can still say"
    server.close()
    peer = link.peer(again := link.server())  # which knows of nobody
    peer.send(ActorHello(2, KEY, 4, incarnation=second.incarnation, ladder_indices=second.ladder_indices))
    incarnations = [peer.receive(ActorWelcome).incarnation, join(link.peer(again), 3).incarnation]
    assert incarnations[1] == incarnations[0] + 1


def test_an_actor_too_many_is_told_so_and_tries_again(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(experience_server, "MAX_ACTORS", 1)
    server = link.server()
    peer = link.peer(server, run_id=1)
    stream = link.stream(run_id=2)
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


def test_actors_whose_messages_are_still_unread_are_not_held_for_dead(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = link.server()
    peers = [link.peer(server, run_id=number) for number in range(1, 6)]
    monkeypatch.setattr(sockets, "MESSAGES_AT_ONCE", 3)
    for _ in range(4):
        for number, peer in enumerate(peers, 1):
            peer.send(ActorStatus(number, 0.0, 0))
    for peer in peers:
        assert peer.socket.poll(0, zmq.POLLOUT)
    server.until(lambda: server.service._unread_after > 0)
    server.now_seconds += 60.0  # in which the server stood still
    server.service.read(server.now_seconds)
    server.service.evict_dead_peers(server.now_seconds)
    assert len(server.service.actors) == 5
    for _ in range(10):
        server.serve()
    server.service.evict_dead_peers(server.now_seconds + 60.0)
    assert len(server.service.actors) == 0


# Each segment once ------------------------------------------------------------------------------------------------


def test_segments_that_come_twice_are_stored_once_and_counted(link: Link) -> None:
    server = link.server()
    peer = link.peer(server, run_id=1)
    peer.send(message_of(1), message_of(1), message_of(2), message_of(1), message_of(2), message_of(3))
    while peer.receive(SegmentAck).sequence < 3:
        pass
    assert server.stored() == [1, 2, 3]
    assert +server.dropped == {"duplicate_segment": 3}


def test_a_segment_before_which_one_is_missing_is_not_held_and_its_actor_joins_again(link: Link) -> None:
    server = link.server()
    peer = link.peer(server, run_id=1)
    peer.send(*(message_of(number) for number in range(2, CREDIT + 5)))
    for _ in range(2, CREDIT + 5):
        peer.receive(Rejoin)
    assert server.stored() == []
    assert +server.dropped == {"early_segment": 1}, "the others come from an actor that is not connected"
    join(link.peer(server), 2)


def test_an_actor_of_which_a_segment_was_lost_on_the_way_is_asked_to_send_it_again(link: Link) -> None:
    server = link.server()
    peer = link.peer(server, run_id=1)
    peer.send(message_of(1))
    assert peer.receive(SegmentAck).sequence == 1
    peer.send_frames(b"damaged", *map(bytes, wire.encode(message_of(2))[1:]))
    peer.send(message_of(3), ActorStatus(1, 0.0, 0))
    peer.receive(Rejoin)
    peer.receive(Rejoin)
    peer.send(ActorHello(1, KEY, 4, acknowledged=1))
    peer.receive(ActorWelcome)
    peer.send(message_of(2), message_of(3))
    while peer.receive(SegmentAck).sequence < 3:
        pass
    assert server.stored() == [1, 2, 3]
    assert +server.dropped == {"not_msgpack": 1, "early_segment": 1}


def test_a_server_without_memory_takes_the_first_that_the_actor_still_has(link: Link) -> None:
    peer = link.peer(server := link.server())
    peer.send(ActorHello(1, KEY, 4, acknowledged=6))
    peer.receive(ActorWelcome)
    peer.send(message_of(6), message_of(7), message_of(8))
    while peer.receive(SegmentAck).sequence < 8:
        pass
    assert server.stored() == [7, 8]
    assert +server.dropped == {"duplicate_segment": 1}


def test_a_refused_segment_counts_its_steps_and_is_acknowledged_behind_those_before_it(link: Link) -> None:
    server = link.server(limiter_that_lets_in(1))
    peer = link.peer(server, run_id=1)
    bad = message_of(3)
    peer.send(message_of(1), message_of(2), bad._replace(crc=bad.crc ^ 1, transitions=5))
    assert peer.receive(SegmentAck).sequence == 1
    server.until(lambda: waiting_in(server.service) == 2)
    assert peer.hears_nothing()
    assert server.replay.environment_steps == 10
    server.limiter.sample(TRANSITIONS)
    assert peer.receive(SegmentAck).sequence == 3
    assert server.replay.environment_steps == 30
    totals = server.service.totals()
    assert (totals["dropped_bad_checksum"], totals["stored"]) == (5, 2 * TRANSITIONS)


# No room ----------------------------------------------------------------------------------------------------------


def test_with_drop_the_oldest_unsent_makes_room_and_only_when_there_is_none(link: Link) -> None:
    server = link.server(limiter_that_lets_in(1))
    stream = link.stream(queue_size=3, overflow="drop")
    server.until(lambda: stream.wait_for_welcome(0))
    for number in range(1 + CREDIT):
        put_all(stream, range(number, number + 1), server)
        server.until(stream._produced.empty)
    server.until(lambda: waiting_in(server.service) == CREDIT)
    for number in range(90, 93):
        assert stream.put(segment_of(number), 10, 5.0)
    assert +stream.dropped == {}
    for number in range(93, 98):
        assert stream.put(segment_of(number), 10, 5.0)
    assert stream.dropped == {"overflow": 5}
    server.limiter.sample(10**6)
    server.until(lambda: len(server.stored()) == 1 + CREDIT + 3)
    assert server.stored() == [*range(1 + CREDIT), 95, 96, 97]
    assert server.replay.environment_steps == 10 * (1 + CREDIT + 8), "those of the dropped are carried on"
    server.until(lambda: server.service.totals()["dropped_overflow"] == 5 * TRANSITIONS)


def test_steps_of_many_dropped_segments_are_carried_by_several_later_ones(link: Link) -> None:
    server = link.server()
    stream = link.stream()
    server.until(lambda: stream.wait_for_welcome(0))
    most = SPEC.max_environment_steps(4)
    stream.put(segment_of(0), 3 * most + 10, 1.0)  # as behind an hour of dropping
    server.until(lambda: server.stored() == [0])
    assert server.replay.environment_steps == most
    put_all(stream, range(1, 5), server)
    server.until(lambda: len(server.stored()) == 5)
    assert server.replay.environment_steps == 3 * most + 10 + 4 * 10
    assert +server.dropped == {}


# Versions ---------------------------------------------------------------------------------------------------------


def speaking(version: int, message: Any) -> list[bytes]:
    header, *frames = (bytes(frame) for frame in wire.encode(message))
    items = msgpack.unpackb(header)
    items[1] = version
    return [msgpack.packb(items), *frames]


def test_a_refusal_can_be_read_whatever_the_version() -> None:
    refusal = Refusal("because", True)
    for version in (0, 1, 2, 99):
        assert wire.decode(speaking(version, refusal)) == refusal
    for message in (Finish("over"), Rejoin()):
        with pytest.raises(wire.WireError, match="wrong_version"):
            wire.decode(speaking(1, message))


def test_a_peer_of_another_version_is_refused_in_its_own(link: Link) -> None:
    server = link.server()
    peer = link.peer(server)
    peer.send_frames(*speaking(1, LearnerHello(1, "", 0, 1, 1)))
    server.until(lambda: peer.socket.poll(0))
    header = msgpack.unpackb(peer.socket.recv_multipart()[0])
    assert header[:3] == ["apex", 1, 8]
    assert f"protocol version {wire.PROTOCOL_VERSION}, this process version 1" in header[3]
    assert header[4] is True
    assert server.dropped["wrong_version"] == 1


@pytest.mark.parametrize("version", ["1", 1.0, -1, 2**63, None, [1]])
def test_a_version_that_is_none_is_counted_and_not_answered(link: Link, version: Any) -> None:
    server = link.server()
    peer = link.peer(server)
    peer.send_frames(msgpack.packb(["apex", version, 0, 1]))
    server.until(lambda: server.dropped["wrong_version"] == 1)
    assert peer.hears_nothing()


def test_an_actor_that_is_refused_for_its_version_ends_with_both_in_one_line(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = link.server()
    encode = wire.encode
    hello = speaking(wire.PROTOCOL_VERSION + 1, ActorHello(1, KEY, 4))
    monkeypatch.setattr(wire, "encode", lambda message: hello if is_hello(message) else encode(message))
    stream = link.stream()
    server.until(stream.finished.is_set)
    versions = f"protocol version {wire.PROTOCOL_VERSION}, this process version {wire.PROTOCOL_VERSION + 1}"
    assert f"server speaks {versions}: run the same release" in str(stream.error)
    assert str(stream.error).isprintable()


def is_hello(message: Any) -> bool:
    return isinstance(message, ActorHello)
