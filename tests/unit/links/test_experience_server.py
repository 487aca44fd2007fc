"""The replay server stores each segment once and in order, acknowledges what is stored, and counts what it refuses."""

from __future__ import annotations

import zlib
from typing import Any

import msgpack
import numpy as np
import pytest

from apex_jax.links import experience_server
from apex_jax.transport import wire
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    ActorWelcome,
    Finish,
    LearnerHello,
    Rejoin,
    SegmentAck,
    SegmentMessage,
)
from apex_jax.types import PEER_TIMEOUT_SECONDS
from tests.rigs.experience_link import CREDIT, KEY, Link, join, limiter_that_lets_in, link, message_of, put_all
from tests.rigs.links import TRANSITIONS, segment_of, waiting_in
from tests.rigs.messages import speaking

__all__ = ["link"]


def test_a_status_is_answered_with_the_stored_sequence(link: Link) -> None:
    peer = link.peer(link.server(), peer_id=1)
    peer.send(message_of(1))
    assert peer.receive(SegmentAck).sequence == 1
    for _ in range(3):
        peer.send(ActorStatus(1, 0.0, 0))
        assert peer.receive(SegmentAck).sequence == 1


def test_segments_are_answered_while_the_limiter_allows_no_insert(link: Link) -> None:
    server = link.server(limiter_that_lets_in(1))
    peer = link.peer(server, peer_id=1)
    for number in range(1, 4):
        peer.send(message_of(number))
        if number > 1:
            assert peer.hears_nothing()
            server.now_seconds += experience_server.ANSWER_SECONDS
            peer.send(message_of(number))  # once more
        assert peer.receive(SegmentAck).sequence == 1
    assert server.stored() == [1]


def test_segments_that_come_twice_are_stored_once_and_counted(link: Link) -> None:
    server = link.server()
    peer = link.peer(server, peer_id=1)
    peer.send(message_of(1), message_of(1), message_of(2), message_of(1), message_of(2), message_of(3))
    while peer.receive(SegmentAck).sequence < 3:
        pass
    assert server.stored() == [1, 2, 3]
    assert +server.dropped == {"duplicate_segment": 3}


def test_a_segment_after_a_missing_one_is_not_kept_and_its_actor_joins_again(link: Link) -> None:
    server = link.server()
    peer = link.peer(server, peer_id=1)
    peer.send(*(message_of(number) for number in range(2, CREDIT + 5)))
    for _ in range(2, CREDIT + 5):
        peer.receive(Rejoin)
    assert server.stored() == []
    assert +server.dropped == {"early_segment": 1}, "the others come from an actor that is not connected"
    join(link.peer(server), 2)


def test_an_actor_whose_segment_arrived_damaged_rejoins_and_sends_it_again(link: Link) -> None:
    server = link.server()
    peer = link.peer(server, peer_id=1)
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


def test_an_empty_server_accepts_the_oldest_unacknowledged_segment_of_an_actor(link: Link) -> None:
    peer = link.peer(server := link.server())
    peer.send(ActorHello(1, KEY, 4, acknowledged=6))
    peer.receive(ActorWelcome)
    peer.send(message_of(6), message_of(7), message_of(8))
    while peer.receive(SegmentAck).sequence < 8:
        pass
    assert server.stored() == [7, 8]
    assert +server.dropped == {"duplicate_segment": 1}


def test_a_refused_segment_counts_its_steps_and_is_acknowledged_after_the_earlier_ones(link: Link) -> None:
    server = link.server(limiter_that_lets_in(1))
    peer = link.peer(server, peer_id=1)
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


def test_a_peer_of_another_protocol_version_is_refused_in_its_own_version(link: Link) -> None:
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
def test_an_invalid_protocol_version_is_counted_and_not_answered(link: Link, version: Any) -> None:
    server = link.server()
    peer = link.peer(server)
    peer.send_frames(msgpack.packb(["apex", version, 0, 1]))
    server.until(lambda: server.dropped["wrong_version"] == 1)
    assert peer.hears_nothing()


def test_the_end_of_the_run_reaches_every_actor(link: Link) -> None:
    server = link.server()
    streams = [link.stream(peer_id) for peer_id in (1, 2)]
    server.until(lambda: len(server.service.actors) == 2)
    server.service.finish("enough")
    for stream in streams:
        server.until(stream.finished.is_set)
        assert stream.error is None
    peer = link.peer(server, peer_id=3)
    server.service.finish("enough")
    assert peer.receive(Finish).reason == "enough"


def test_only_stored_segments_are_acknowledged(link: Link) -> None:
    server = link.server(limiter_that_lets_in(2))
    peer = link.peer(server, peer_id=1)
    peer.send(*(message_of(number) for number in (1, 2, 3, 4)))
    acknowledged = 0
    while acknowledged < 2:
        acknowledged = peer.receive(SegmentAck).sequence
    assert acknowledged == 2
    server.until(lambda: waiting_in(server.service) == 2)
    assert peer.hears_nothing()
    server.limiter.sample(2 * TRANSITIONS)
    assert peer.receive(SegmentAck).sequence == 4
    assert server.stored() == [1, 2, 3, 4]


def test_a_sender_beyond_its_credit_is_counted_and_not_stored(link: Link) -> None:
    server = link.server(limiter_that_lets_in(1))
    peer = link.peer(server, peer_id=1)
    peer.send(message_of(1))
    peer.receive(SegmentAck)
    peer.send(*(message_of(number) for number in range(2, CREDIT + 2)))
    server.until(lambda: waiting_in(server.service) == CREDIT)
    peer.send(*(message_of(number) for number in (CREDIT + 2, CREDIT + 3)))
    server.until(lambda: server.dropped["over_credit"] == 2)
    assert waiting_in(server.service) == CREDIT
    peer.send(message_of(1))
    server.until(lambda: server.dropped["duplicate_segment"] == 1)


@pytest.mark.parametrize("num_stored", [1, 3])
def test_segments_of_an_evicted_actor_are_stored_once_and_within_its_credit(link: Link, num_stored: int) -> None:
    server = link.server(limiter_that_lets_in(num_stored))
    stream = link.stream(queue_size=8)
    put_all(stream, range(num_stored + CREDIT + 3), server)
    server.until(lambda: waiting_in(server.service) == CREDIT)
    for _ in range(3):
        server.dropped.clear()
        server.service.evict_dead_peers(PEER_TIMEOUT_SECONDS + 1)
        assert not server.service.actors
        server.until(lambda: server.dropped["duplicate_segment"] == CREDIT)
        assert waiting_in(server.service) == len(stream._outbox) == CREDIT
    server.limiter.sample(10**6)
    server.until(lambda: len(server.stored()) == num_stored + CREDIT + 3)
    assert server.stored() == list(range(num_stored + CREDIT + 3))
    server.until(lambda: not stream._outbox)


def corrupt_bodies() -> dict[str, SegmentMessage]:
    sound = message_of(1)
    columns = segment_of(1).columns
    priority = columns["priority"].copy()
    priority[3] = np.nan
    nan = priority.tobytes() + sound.body[priority.nbytes :]
    return {
        "bad_checksum": sound._replace(crc=sound.crc ^ 1),
        "bad_length": sound._replace(body=sound.body[:9], crc=zlib.crc32(sound.body[:9])),
        "bad_priority": sound._replace(body=nan, crc=zlib.crc32(nan)),
    }


@pytest.mark.parametrize("reason", corrupt_bodies())
def test_a_corrupt_segment_is_counted_by_reason_and_acknowledged(link: Link, reason: str) -> None:
    server = link.server()
    peer = link.peer(server, peer_id=1)
    peer.send(corrupt_bodies()[reason])
    assert peer.receive(SegmentAck).sequence == 1
    assert +server.dropped == {reason: 1}
    peer.send(message_of(2))
    assert peer.receive(SegmentAck).sequence == 2
    assert server.stored() == [2]


def test_garbage_is_counted_and_the_next_message_is_served(link: Link) -> None:
    server = link.server()
    peer = link.peer(server, peer_id=1)
    peer.send_frames(b"\xc1garbage")
    peer.send_frames(b"", b"", b"")
    peer.send(SegmentAck(5), message_of(1))  # the first does not belong here
    assert peer.receive(SegmentAck).sequence == 1
    assert sum(server.dropped.values()) == 3
    assert server.dropped["unknown_kind"] == 1
    assert server.stored() == [1]
