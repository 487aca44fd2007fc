"""Specification of the experience link: actors' streams and the replay server's service over real sockets."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from apex_jax.links import connection
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    EpisodeStatistics,
    Finish,
    Goodbye,
    Refusal,
    Rejoin,
    SegmentAck,
    SegmentMessage,
)
from apex_jax.types import PEER_TIMEOUT_SECONDS
from tests.experience_link import CREDIT, Link, join, limiter_that_lets_in, message_of, put_all
from tests.links import CONFIG, TRANSITIONS, segment_of, waiting_in


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.05)
    link = Link()
    yield link
    link.close()


# Joining and leaving ----------------------------------------------------------------------------------------------


def test_each_actor_is_welcomed_with_places_of_its_own(link: Link) -> None:
    server = link.server()
    first, second = join(link.peer(server), 1), join(link.peer(server), 2)
    assert (first.incarnation, second.incarnation) == (1, 2)
    assert sorted([*first.ladder_indices, *second.ladder_indices]) == list(range(8))
    assert (first.ladder_size, first.max_outstanding_segments) == (8, CREDIT)


def test_an_actor_of_another_configuration_is_refused_for_good_and_told_what_differs(link: Link) -> None:
    server = link.server()
    stream = link.stream(compatibility_key=CONFIG.compatibility_key.replace("Pong-v5", "Other-v5"))
    server.until(stream.finished.is_set)
    differs = "environment.task: the replay server Pong-v5, this actor Other-v5; make them equal"
    assert str(stream.error).endswith(f": {differs}"), "and nothing that is equal"
    assert server.dropped["another_config"] >= 1
    assert server.service.actors == {}


def test_a_refusal_of_an_actor_is_final(link: Link) -> None:
    peer = link.peer(link.server())
    peer.send(ActorHello(1, "task=Other-v5", 4))
    assert peer.receive(Refusal).final


@pytest.mark.parametrize("message", [message_of(1), ActorStatus(1, 0.0, 0), Goodbye(1)])
def test_who_has_not_said_hello_is_asked_to(link: Link, message: Any) -> None:
    server = link.server()
    peer = link.peer(server)
    peer.send(message)
    peer.receive(Rejoin)
    assert server.stored() == []


def test_a_silent_actor_is_forgotten_and_its_places_go_to_the_next(link: Link) -> None:
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
    assert [actor.run_id for actor in server.service.actors.values()] == [2]
    assert join(link.peer(server), 3).ladder_indices.tolist() == ladder_indices.tolist()


def test_goodbye_frees_the_places_at_once(link: Link) -> None:
    server = link.server()
    stream = link.stream()
    server.until(lambda: stream.wait_for_welcome(0))
    welcome = stream.wait_for_welcome(0)
    assert welcome is not None
    stream.close()
    server.until(lambda: not server.service.actors)
    assert join(link.peer(server), 2).ladder_indices.tolist() == welcome.ladder_indices.tolist()


def test_an_actor_that_reconnects_keeps_its_places(link: Link) -> None:
    server = link.server()
    before = join(link.peer(server), 1)
    join(link.peer(server), 2)
    after = join(link.peer(server), 1)
    assert (after.incarnation, after.ladder_indices.tolist()) == (before.incarnation, before.ladder_indices.tolist())
    assert len(server.service.actors) == 2


def test_an_actor_that_reconnects_is_told_again_what_is_stored(link: Link) -> None:
    server = link.server()
    for _ in range(2):
        peer = link.peer(server, run_id=1)
        peer.send(message_of(1))
        assert peer.receive(SegmentAck).sequence == 1
    assert server.stored() == [1]


def test_a_hello_said_twice_is_welcomed_once(link: Link) -> None:
    server = link.server()
    peer = link.peer(server, run_id=1)
    peer.send(ActorHello(1, CONFIG.compatibility_key, 4))
    assert peer.hears_nothing()
    assert len(server.service.actors) == 1


def test_a_connection_that_names_itself_anew_holds_no_places_twice(link: Link) -> None:
    server = link.server()
    peer = link.peer(server, run_id=1)
    for run_id in range(2, 10):
        join(peer, run_id)
    assert len(server.service.actors) == 1
    peer.send(Goodbye(9))
    server.until(lambda: not server.service.actors)
    assert not server.service._membership._occupants.any()


def test_the_end_of_the_run_reaches_every_actor(link: Link) -> None:
    server = link.server()
    streams = [link.stream(run_id) for run_id in (1, 2)]
    server.until(lambda: len(server.service.actors) == 2)
    server.service.finish("enough")
    for stream in streams:
        server.until(stream.finished.is_set)
        assert stream.error is None
    peer = link.peer(server, run_id=3)
    server.service.finish("enough")
    assert peer.receive(Finish).reason == "enough"


# Segments ---------------------------------------------------------------------------------------------------------


def test_segments_are_stored_in_order_and_their_steps_summed(link: Link) -> None:
    server = link.server()
    stream = link.stream()
    put_all(stream, range(20), server)
    server.until(lambda: len(server.stored()) == 20)
    assert server.stored() == list(range(20))
    assert server.replay.environment_steps == 200
    server.until(lambda: not stream._outbox)
    assert +server.dropped == {}


def test_only_what_is_stored_is_acknowledged_all_at_once(link: Link) -> None:
    server = link.server(limiter_that_lets_in(2))
    peer = link.peer(server, run_id=1)
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


def test_an_actor_held_back_waits_and_loses_nothing(link: Link) -> None:
    server = link.server(limiter_that_lets_in(1))
    stream = link.stream(queue_size=2)
    put_all(stream, range(1 + CREDIT + 2), server)
    server.until(lambda: waiting_in(server.service) == CREDIT)
    assert not stream.put(segment_of(99), 0, 0.05)
    assert len(stream._outbox) == CREDIT
    server.limiter.sample(10**6)
    server.until(lambda: len(server.stored()) == 1 + CREDIT + 2)
    assert server.stored() == list(range(1 + CREDIT + 2))
    assert stream.put(segment_of(99), 0, 5.0)


def test_a_sender_beyond_its_credit_is_counted_and_not_stored(link: Link) -> None:
    server = link.server(limiter_that_lets_in(1))
    peer = link.peer(server, run_id=1)
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
def test_an_actor_held_for_dead_is_stored_once_and_gets_no_more_credit(link: Link, num_stored: int) -> None:
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
    peer = link.peer(server, run_id=1)
    peer.send(corrupt_bodies()[reason])
    assert peer.receive(SegmentAck).sequence == 1
    assert +server.dropped == {reason: 1}
    peer.send(message_of(2))
    assert peer.receive(SegmentAck).sequence == 2
    assert server.stored() == [2]


def test_garbage_is_counted_and_the_next_message_is_served(link: Link) -> None:
    server = link.server()
    peer = link.peer(server, run_id=1)
    peer.send_frames(b"\xc1garbage")
    peer.send_frames(b"", b"", b"")
    peer.send(SegmentAck(5), message_of(1))  # the first does not belong here
    assert peer.receive(SegmentAck).sequence == 1
    assert sum(server.dropped.values()) == 3
    assert server.dropped["unknown_kind"] == 1
    assert server.stored() == [1]


def test_a_segment_of_nan_is_left_out_by_its_actor_and_its_steps_are_carried_on(link: Link) -> None:
    server = link.server()
    stream = link.stream()
    segment = segment_of(1)
    columns = segment.columns | {"priority": segment.columns["priority"] * np.float32("nan")}
    put_all(stream, range(1), server)
    assert stream.put(segment._replace(columns=columns), 10, 5.0)
    put_all(stream, range(2, 3), server)
    server.until(lambda: server.stored() == [0, 2])
    assert stream.dropped == {"bad_priority": 1}
    assert server.replay.environment_steps == 30


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_actor_whose_stream_breaks_is_told_instead_of_waiting_for_ever(link: Link) -> None:
    server = link.server()
    stream = link.stream()
    assert stream.put(segment_of(1)._replace(frames=np.zeros(3, np.float32)), 0, 5.0)
    server.until(stream.finished.is_set)
    assert "the segment spec says" in str(stream.error)


# Episodes ---------------------------------------------------------------------------------------------------------


def test_returns_are_averaged_over_all_games_and_by_band_of_epsilon(link: Link) -> None:
    server = link.server()
    stream = link.stream()
    epsilon, returns = np.array([0.4, 0.001, 0.3], np.float32), np.array([1, 20, 3], np.float32)
    stream.put_episodes(epsilon, returns, np.array([10, 20, 60], np.int32))
    server.until(lambda: server.service.episodes.length.count == 3)
    episodes = server.service.episodes
    assert (episodes.episode_return.result(), episodes.length.result()) == (8.0, 30.0)
    assert {band: mean.result() for band, mean in episodes.by_band.items()} == {"above_0.2": 2.0, "below_0.01": 20.0}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_return_that_is_no_number_is_counted_and_spoils_no_mean(link: Link, value: float) -> None:
    server = link.server()
    peer = link.peer(server, run_id=1)
    for numbers in ([value], [4.0]):
        peer.send(
            EpisodeStatistics(1, np.full(1, 0.4, np.float32), np.array(numbers, np.float32), np.ones(1, np.int32))
        )
    server.until(lambda: server.service.episodes.length.count == 1)
    assert server.service.episodes.episode_return.result() == 4.0
    assert +server.dropped == {"bad_statistics": 1}


# A server that goes away ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_segments_sent_while_servers_come_and_go_are_each_stored_by_one_that_acknowledged(
    link: Link, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    stream = link.stream(queue_size=64)
    for number in range(24):
        assert stream.put(segment_of(number), 10, 5.0)

    def all_acknowledged() -> bool:
        return stream._outbox._sequence == 24 and not stream._outbox

    stored_anywhere: set[int] = set()
    for enough in [*rng.integers(1, 8, 3), 24]:
        stored = link.server().store_at_least(int(enough), or_until=all_acknowledged)
        assert stored == sorted(set(stored)), "in order, and each once"
        stored_anywhere |= set(stored)
    assert stored_anywhere == set(range(24))


def test_a_server_that_comes_back_with_less_credit_gets_everything_in_turn(link: Link) -> None:
    server = link.server(limiter_that_lets_in(1))
    stream = link.stream(queue_size=8)
    put_all(stream, range(1 + CREDIT), server)
    server.until(lambda: waiting_in(server.service) == CREDIT)
    server.close()
    smaller = CONFIG.replace(actor=replace(CONFIG.actor, max_outstanding_segments=1))
    server = link.server(limiter_that_lets_in(1), smaller)
    server.until(lambda: waiting_in(server.service) == 1)
    server.limiter.sample(10**6)
    server.until(lambda: len(server.stored()) == CREDIT)
    assert server.stored() == list(range(1, 1 + CREDIT))
    assert server.dropped["over_credit"] == 0
