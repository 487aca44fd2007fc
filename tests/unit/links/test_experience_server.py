"""The replay server stores each segment once and in order, welcomes, refuses and evicts actors, and averages games."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from apex_jax.config import MetricsConfig
from apex_jax.links import experience_server
from apex_jax.links.experience_server import MAX_ACTOR_NUMBER, ActorPeer, EpisodeMeans, Membership, Waiting
from apex_jax.transport import sockets, wire
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    ActorWelcome,
    EpisodeStatistics,
    Finish,
    Goodbye,
    LearnerHello,
    Rejoin,
    SegmentAck,
)
from apex_jax.types import PEER_TIMEOUT_SECONDS, SegmentRecord
from tests.rigs.experience_link import CREDIT, KEY, Link, join, limiter_that_lets_in, message_of
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, waiting_in
from tests.rigs.messages import speaking


def test_a_status_is_answered_with_the_stored_sequence(experience: Link) -> None:
    peer = experience.peer(experience.server(), peer_id=1)
    peer.send(message_of(1))
    assert peer.receive(SegmentAck).sequence == 1
    for _ in range(3):
        peer.send(ActorStatus(0.0, 0))
        assert peer.receive(SegmentAck).sequence == 1


def test_segments_are_answered_while_the_limiter_allows_no_insert(experience: Link) -> None:
    server = experience.server(limiter_that_lets_in(1))
    peer = experience.peer(server, peer_id=1)
    for number in range(1, 4):
        peer.send(message_of(number))
        if number > 1:
            assert peer.receives_nothing()
            server.now_seconds += experience_server.ANSWER_SECONDS
            peer.send(message_of(number))  # once more
        assert peer.receive(SegmentAck).sequence == 1
    assert server.stored() == [1]


def test_an_empty_server_accepts_the_oldest_unacknowledged_segment_of_an_actor(experience: Link) -> None:
    peer = experience.peer(server := experience.server())
    peer.send(ActorHello(1, KEY, 4, acknowledged=6))
    peer.receive(ActorWelcome)
    peer.send(message_of(6), message_of(7), message_of(8))
    while peer.receive(SegmentAck).sequence < 8:
        pass
    assert server.stored() == [7, 8]
    assert +server.dropped == {"duplicate_segment": 1}


def test_a_refused_segment_counts_its_steps_and_is_acknowledged_after_the_earlier_ones(experience: Link) -> None:
    server = experience.server(limiter_that_lets_in(1))
    peer = experience.peer(server, peer_id=1)
    bad = message_of(3)
    peer.send(message_of(1), message_of(2), bad._replace(crc=bad.crc ^ 1, transitions=5))
    assert peer.receive(SegmentAck).sequence == 1
    server.until(lambda: waiting_in(server.service) == 2)
    assert peer.receives_nothing()
    assert server.replay.ledger.steps == 10
    server.limiter.sampled += TRANSITIONS
    assert peer.receive(SegmentAck).sequence == 3
    assert server.replay.ledger.steps == 30
    totals = server.replay.ledger.totals()
    assert (totals["dropped_bad_checksum"], totals["stored"]) == (5, 2 * TRANSITIONS)


def test_a_peer_of_another_protocol_version_is_refused_in_its_own_version(experience: Link) -> None:
    server = experience.server()
    peer = experience.peer(server)
    peer.send_frames(*speaking(1, LearnerHello(1, "", 0, 1, 1)))
    server.until(lambda: peer.socket.poll(0))
    header = msgpack.unpackb(peer.socket.recv_multipart()[0])
    assert header[:3] == ["apex", 1, 8]
    assert f"protocol version {wire.PROTOCOL_VERSION}, this process version 1" in header[3]
    assert header[4] is True
    assert server.dropped["wrong_version"] == 1


def test_the_end_of_the_run_reaches_every_actor(experience: Link) -> None:
    server = experience.server()
    streams = [experience.stream(peer_id) for peer_id in (1, 2)]
    server.until(lambda: len(server.service.actors) == 2)
    server.service.finish("enough")
    for stream in streams:
        server.until(stream.finished.is_set)
        assert stream.error is None
        stream.close()
    server.until(lambda: not server.service.actors)
    peer = experience.peer(server, peer_id=3)
    server.service.finish("enough")
    assert peer.receive(Finish).reason == "enough"


def test_a_sender_beyond_its_credit_is_counted_and_not_stored(experience: Link) -> None:
    server = experience.server(limiter_that_lets_in(1))
    peer = experience.peer(server, peer_id=1)
    peer.send(message_of(1))
    peer.receive(SegmentAck)
    peer.send(*(message_of(number) for number in range(2, CREDIT + 2)))
    server.until(lambda: waiting_in(server.service) == CREDIT)
    peer.send(*(message_of(number) for number in (CREDIT + 2, CREDIT + 3)))
    server.until(lambda: server.dropped["over_credit"] == 2)
    assert waiting_in(server.service) == CREDIT
    peer.send(message_of(1))
    server.until(lambda: server.dropped["duplicate_segment"] == 1)


# Who may join, and under which numbers ------------------------------------------------------------------------------


def test_each_actor_is_welcomed_with_ladder_indices_of_its_own(experience: Link) -> None:
    server = experience.server()
    first, second = join(experience.peer(server), 1), join(experience.peer(server), 2)
    assert (first.actor_number, second.actor_number) == (1, 2)
    assert sorted([*first.ladder_indices, *second.ladder_indices]) == list(range(8))
    assert (first.ladder_size, first.max_outstanding_segments) == (8, CREDIT)


def test_a_silent_actor_is_evicted_and_its_ladder_indices_go_to_the_next(experience: Link) -> None:
    server = experience.server()
    silent, alive = experience.peer(server), experience.peer(server)
    ladder_indices = join(silent, 1).ladder_indices
    join(alive, 2)
    server.now_seconds = PEER_TIMEOUT_SECONDS
    alive.send(ActorStatus(5.0, 7))
    server.until(lambda: any(actor.status.weights_version == 7 for actor in server.service.actors.values()))
    server.service.evict_dead_peers(PEER_TIMEOUT_SECONDS)
    assert len(server.service.actors) == 2
    server.service.evict_dead_peers(PEER_TIMEOUT_SECONDS + 0.1)
    assert [actor.peer_id for actor in server.service.actors.values()] == [2]
    assert join(experience.peer(server), 3).ladder_indices.tolist() == ladder_indices.tolist()


def test_nobody_is_evicted_while_its_heartbeat_may_be_pending_but_a_flood_protects_nobody(
    experience: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experience_server, "MAX_ACTORS", 2)
    server = experience.server()
    _, flooding = experience.peer(server, peer_id=1), experience.peer(server, peer_id=2)
    monkeypatch.setattr(sockets, "MESSAGES_AT_ONCE", 1)
    flooding.send(*[ActorStatus(0.0, 0)] * 6)
    for number in range(1, 6):  # two peers can have at most so many unread heartbeats as there are peers, twice over
        assert server.socket.poll(10_000)
        server.service.read(PEER_TIMEOUT_SECONDS + 1)
        server.service.evict_dead_peers(PEER_TIMEOUT_SECONDS + 1)
        assert len(server.service.actors) == (2 if number <= 4 else 1)


def test_a_repeated_hello_is_welcomed_once(experience: Link) -> None:
    server = experience.server()
    peer = experience.peer(server, peer_id=1)
    peer.send(ActorHello(1, KEY, 4))
    assert peer.receives_nothing()
    assert len(server.service.actors) == 1


def test_a_new_peer_id_on_a_connection_frees_the_ladder_indices_of_the_previous_one(experience: Link) -> None:
    server = experience.server()
    peer = experience.peer(server)
    first, *_ = [join(peer, peer_id) for peer_id in range(1, 10)]
    assert len(server.service.actors) == 1
    peer.send(Goodbye())
    server.until(lambda: not server.service.actors)
    assert join(experience.peer(server), 10).ladder_indices.tolist() == first.ladder_indices.tolist()


def test_a_restarted_server_accepts_the_ladder_indices_and_the_actor_number_of_an_actor(experience: Link) -> None:
    first = experience.server()
    streams = [experience.stream(peer_id) for peer_id in (1, 2)]
    first.until(lambda: all(stream.wait_for_welcome(0) for stream in streams))
    welcomes: list[Any] = [stream.wait_for_welcome(0) for stream in streams]
    first.close()
    second = experience.server()
    newcomer = join(experience.peer(second), 3)
    second.until(lambda: len(second.service.actors) == 3)
    for actor in second.service.actors.values():
        if actor.peer_id != 3:
            welcome = welcomes[actor.peer_id - 1]
            assert (actor.actor_number, [*actor.ladder_indices]) == (welcome.actor_number, [*welcome.ladder_indices])
    assert sorted(actor.actor_number for actor in second.service.actors.values() if actor.peer_id != 3) == [1, 2]
    assert newcomer.ladder_size == 8
    assert join(experience.peer(second), 4).actor_number == 3


def test_a_new_actor_gets_the_ladder_indices_of_a_quiet_one_before_its_eviction(experience: Link) -> None:
    server = experience.server()
    living, dead = experience.peer(server, peer_id=1), join(experience.peer(server), 2)
    server.now_seconds = experience_server.QUIET_SECONDS + 1.0
    living.send(ActorStatus(0.0, 0))
    assert living.receive(SegmentAck).sequence == 0
    again = join(experience.peer(server), 3)
    assert len(server.service.actors) == 3, "the dead one is not forgotten yet"
    assert again.ladder_indices.tolist() == dead.ladder_indices.tolist()
    assert again.actor_number == 3


@pytest.mark.parametrize("ladder_indices", [[0, 1, 2], [0, 1, 2, 8], [-1, 0, 1, 2], []])
def test_ladder_indices_outside_the_ladder_are_replaced(experience: Link, ladder_indices: list[int]) -> None:
    peer = experience.peer(experience.server())
    peer.send(ActorHello(1, KEY, 4, actor_number=5, ladder_indices=np.array(ladder_indices, np.int32)))
    welcome = peer.receive(ActorWelcome)
    assert (welcome.actor_number, welcome.ladder_indices.tolist()) == (5, [0, 2, 5, 7])


@pytest.mark.parametrize(("claim", "given"), [
    (MAX_ACTOR_NUMBER, MAX_ACTOR_NUMBER),
    (MAX_ACTOR_NUMBER + 1, 1),  # not accepted
    (2**48, 1),  # the largest of a message
])  # fmt: skip
def test_after_the_largest_claimed_actor_number_later_ones_still_fit_in_a_message(
    experience: Link, claim: int, given: int
) -> None:
    server = experience.server()
    peer = experience.peer(server)
    peer.send(ActorHello(1, KEY, 4, actor_number=claim, ladder_indices=np.arange(4, dtype=np.int32)))
    assert peer.receive(ActorWelcome).actor_number == given
    second = join(experience.peer(server), 2)
    assert second.actor_number == given + 1, "a number that fits the protocol"


def test_an_actor_beyond_the_limit_is_refused_and_retries(
    experience: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(experience_server, "MAX_ACTORS", 1)
    server = experience.server()
    peer = experience.peer(server, peer_id=1)
    stream = experience.stream(peer_id=2)
    server.until(lambda: stream.dropped["refused"] >= 3)
    assert not stream.finished.is_set()
    assert len(caplog.records) == 1
    back = experience.peer(server)
    join(back, 1)  # it is no other
    back.send(Goodbye())
    server.until(lambda: stream.wait_for_welcome(0))
    peer.send(message_of(1))
    peer.receive(Rejoin)


# Games ------------------------------------------------------------------------------------------------------------


def test_means_of_numbers_in_info_are_of_the_games_that_have_them() -> None:
    means = EpisodeMeans(CONFIG.replace(metrics=MetricsConfig(info=("level", "is_success"))), SPEC)
    games = np.full(2, 0.5, np.float32), np.full(2, 7, np.float32), np.full(2, 10, np.int32)
    numbers = np.array([[1.0, 3.0, 9.0], [0.0, np.nan, 9.0]], np.float32)
    for names in ("is_success level other", "is_success"):  # an actor's own names, of which some are asked for
        means.add(EpisodeStatistics(*games, names, numbers))
    values = means.means.take()
    assert (values["charts/info_is_success"], values["charts/info_level"]) == (0.5, 3.0)
    assert "charts/info_other" not in values
    assert means.means.take() == {}


# Turns and places ---------------------------------------------------------------------------------------------------


LADDER = 8


def actor_of(peer_id: int) -> ActorPeer:
    ladder_indices = np.array([peer_id % LADDER], np.int32)
    return ActorPeer(peer_id, peer_id, ladder_indices, ActorStatus(0.0, 0), 0, b"%d" % peer_id)


def test_connected_actors_take_turns_and_their_segments_are_stored_in_order() -> None:
    membership, stored = Membership(LADDER), []
    for peer_id, segments in ((1, 4), (2, 2), (3, 3), (4, 1)):
        actor = actor_of(peer_id)
        membership.actors[actor.connection] = actor
        for sequence in range(1, segments + 1):
            actor.received = sequence
            membership.enqueue(actor, Waiting(SegmentRecord(peer_id, sequence, 0, 1, b"", 0), None, "refused"))
    membership.leave(b"3")
    membership.leave(b"4", keeps_pending=True)  # it has ended, and what it has sent is stored
    while (waiting := membership.next_waiting()) is not None:
        stored.append((waiting.segment.peer_id, waiting.segment.sequence))
        assert membership.dequeue().stored == waiting.segment.sequence
    assert stored == [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 3), (1, 4)]
