"""The replay server stores each segment once and in order, acknowledges, counts refusals, and averages games."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apex_jax.links import experience_server
from apex_jax.links.episode_means import EpisodeMeans
from apex_jax.run.metrics import EPSILON_BANDS
from apex_jax.transport import wire
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    ActorWelcome,
    EpisodeStatistics,
    Finish,
    LearnerHello,
    Rejoin,
    SegmentAck,
)
from apex_jax.types import PEER_TIMEOUT_SECONDS
from tests.rigs.experience_link import CREDIT, KEY, Link, limiter_that_lets_in, link, message_of, put_all
from tests.rigs.links import TRANSITIONS, waiting_in
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
            assert peer.receives_nothing()
            server.now_seconds += experience_server.ANSWER_SECONDS
            peer.send(message_of(number))  # once more
        assert peer.receive(SegmentAck).sequence == 1
    assert server.stored() == [1]


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
    assert peer.receives_nothing()
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
    assert peer.receives_nothing()
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
    for _ in range(3):
        server.until(lambda: waiting_in(server.service) == CREDIT)
        server.service.evict_dead_peers(PEER_TIMEOUT_SECONDS + 1)
        assert not server.service.actors
    server.until(lambda: waiting_in(server.service) == CREDIT)
    server.limiter.sample(10**6)
    sent = num_stored + CREDIT + 3
    server.until(lambda: stream.acknowledged == sent * TRANSITIONS)
    assert server.stored() == list(range(sent))
    assert +server.dropped == {}


GAME = st.tuples(st.sampled_from([0.0, 0.005, 0.03, 0.1, 0.9, 1.0]), st.integers(-100, 1000), st.integers(0, 10**6))


def statistics_of(games: list[tuple[float, int, int]]) -> EpisodeStatistics:
    epsilon, returns, steps = zip(*games, strict=True) if games else ((), (), ())
    arrays = np.array(epsilon, np.float32), np.array(returns, np.float32), np.array(steps, np.int32)
    return EpisodeStatistics(1, *arrays, "", np.zeros((len(games), 0), np.float32))


def band_of(epsilon: float) -> str:
    """The slow twin: the name of the band of an epsilon that is no edge of a band."""
    if epsilon < 0.01:
        return "epsilon_below_0.01"
    if epsilon < 0.05:
        return "epsilon_0.01_to_0.05"
    return "epsilon_0.05_to_0.2" if epsilon < 0.2 else "epsilon_above_0.2"


@given(messages=st.lists(st.lists(GAME, max_size=5), max_size=5))
def test_means_are_of_all_games_however_they_are_spread_over_messages(messages: list[list[Any]]) -> None:
    means, games = EpisodeMeans(EPSILON_BANDS), [game for message in messages for game in message]
    assert all(means.add(statistics_of(message)) for message in messages)
    assert means.episode_return.count == means.length.count == len(games)
    if games:
        assert means.episode_return.result() == pytest.approx(np.mean([returned for _, returned, _ in games]))
        assert means.length.result() == pytest.approx(np.mean([steps for *_, steps in games]))
    by_band: dict[str, list[int]] = {}
    for epsilon, returned, _ in games:
        by_band.setdefault(band_of(epsilon), []).append(returned)
    assert {band: mean.count for band, mean in means.by_band.items()} == {b: len(of) for b, of in by_band.items()}
    for band, returns in by_band.items():
        assert means.by_band[band].result() == pytest.approx(np.mean(returns))


@pytest.mark.parametrize(("field", "value"), [
    ("exploration", -0.1), ("exploration", np.inf), ("exploration", np.nan),
    ("episode_return", -np.inf), ("episode_return", np.nan), ("episode_steps", -1),
])  # fmt: skip
def test_message_with_one_impossible_value_adds_none_of_its_games(field: str, value: float) -> None:
    means, message = EpisodeMeans(EPSILON_BANDS), statistics_of([(0.5, 7, 10), (0.5, 9, 20)])
    getattr(message, field)[1] = value
    assert not means.add(message)
    assert (means.episode_return.count, means.length.count, means.by_band) == (0, 0, {})


def test_means_of_numbers_in_info_are_of_the_games_that_have_them() -> None:
    means = EpisodeMeans(EPSILON_BANDS, ("level", "is_success"))
    numbers = np.array([[1.0, 3.0, 9.0], [0.0, np.nan, 9.0]], np.float32)
    for names in ("is_success level other", "is_success"):  # an actor's own names, of which some are asked for
        means.add(statistics_of([(0.5, 7, 10)] * 2)._replace(info_names=names, info=numbers))
    values = means.values()
    assert (values["charts/info_is_success"], values["charts/info_level"]) == (0.5, 3.0)
    assert "charts/info_other" not in values
    assert means.emptied().values() == {}
