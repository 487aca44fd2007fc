"""Peers with a valid key that attack the run with well-formed messages."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from apex_jax.agent.exploration import choose_ladder_indices
from apex_jax.links.membership import MAX_ACTOR_NUMBER
from apex_jax.segment_codec import value_limits
from apex_jax.transport import sockets, wire
from apex_jax.transport.messages import (
    ActorHello,
    ActorWelcome,
    EpisodeStatistics,
    Goodbye,
    IndexBatches,
    LearnerHello,
    Rejoin,
    SegmentAck,
    StreamedSegments,
)
from apex_jax.types import MAX_COUNT, SegmentRecord
from tests.fuzz.targets import fuzz_config
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, credit, waiting_in
from tests.rigs.sampling_link import AskingClient
from tests.rigs.served import BODY, Served, segment, stores_for

MOST_GAMES = 4096  # in one message


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(fuzz_config(tmp_path))
    yield served
    served.close()


def statistics(peer_id: int, number: int) -> EpisodeStatistics:
    """Games with epsilons in all bands."""
    epsilon = np.linspace(0, 1, number, dtype=np.float32)
    arrays = epsilon, np.ones(number, np.float32), np.ones(number, np.int32)
    return EpisodeStatistics(peer_id, *arrays, "", np.zeros((number, 0), np.float32))


def calls_of(action: Callable[[], Any]) -> int:
    """Returns how many functions, of Python and of C, are called meanwhile."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


# One client's work, and the turns of the others -------------------------------------------------------------------


def test_fault_39_work_per_statistics_message_does_not_grow_with_its_games(served: Served) -> None:
    actor, episodes = served.actor(1), served.server.experience.episodes

    def calls_for(number: int) -> int:
        actor.send(statistics(1, number))
        served.server.experience_socket.poll(10_000)
        before = episodes.length.count
        calls = calls_of(served.serve)
        assert episodes.length.count == before + number
        return calls

    calls_for(8)  # a mean for each band is made once
    assert calls_for(MOST_GAMES) < calls_for(8) + 50


def test_fault_39_ladder_indices_of_a_large_actor_take_few_iterations_even_on_an_uneven_ladder() -> None:
    occupants = np.full(16, 10_000)
    occupants[3] = 0
    assert calls_of(lambda: choose_ladder_indices(occupants, MOST_GAMES)) < 200


def test_fault_39_backlog_of_slow_messages_does_not_starve_the_learner(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, learner = served.actor(1), served.learner()
    stores_for(served, actor, 1, 1)
    learner.send(credit(5, groups=1, segments=10))
    learner.receive(StreamedSegments)
    learner.receive(IndexBatches)
    monkeypatch.setattr(sockets, "READING_TURN_SECONDS", 0.0, raising=False)  # one message takes a whole turn
    experience, sampling = served.server.experience_socket, served.server.sampling_socket
    serve, learner.meanwhile = learner.meanwhile, lambda: None
    for _ in range(20):
        actor.socket.send_multipart(wire.encode(statistics(1, 1)))
    learner.send(credit(5, groups=1, segments=10))
    assert experience.poll(10_000)
    assert sampling.poll(10_000)
    serve()
    learner.receive(IndexBatches)
    assert served.server.experience.episodes.length.count < 20


# Names of others --------------------------------------------------------------------------------------------------


def hello(peer_id: int, acknowledged: int = 0) -> ActorHello:
    return ActorHello(peer_id, CONFIG.compatibility_key, 4, acknowledged)


def test_fault_39_actor_rejoins_after_a_false_claim_in_its_name(served: Served) -> None:
    actor = served.actor(1)
    stores_for(served, actor, 1, 1)
    actor.send(Goodbye(1))
    served.until(lambda: not served.server.experience.actors)
    served.actor(1, acknowledged=MAX_COUNT)
    actor.send(hello(1, acknowledged=1))
    actor.receive(ActorWelcome)
    stores_for(served, actor, 1, 2)
    assert served.server.replay.buffer.inserted_segments == 2


def test_fault_39_actor_keeps_its_ladder_indices_after_a_claim_of_the_largest_actor_number(served: Served) -> None:
    served.peer("experience").send(hello(1)._replace(actor_number=MAX_ACTOR_NUMBER))
    served.until(lambda: served.server.replay.highest_actor_number)
    actor = served.peer("experience")
    actor.send(hello(2))
    welcome = actor.receive(ActorWelcome)
    actor.send(Goodbye(2))
    ladder_indices = np.full(
        4, welcome.ladder_indices[0], np.int32
    )  # with which it has acted, as the server before gave them
    actor.send(hello(2)._replace(actor_number=welcome.actor_number, ladder_indices=ladder_indices))
    assert actor.receive(ActorWelcome).ladder_indices.tolist() == ladder_indices.tolist()


def test_fault_39_the_status_page_shows_no_peer_id(served: Served) -> None:
    peer_id = 0x1234_5678_9ABC_DEF0
    served.actor(peer_id)
    served.learner(peer_id)
    report = json.dumps(served.server.describe())
    assert f"{peer_id:x}" not in report
    assert str(peer_id) not in report
    digests = [peer["peer_id"] for peer in served.server.describe()["peers"]["actors"]]
    assert len(digests) == 1
    assert len(digests[0]) == 16


# Impossible values ------------------------------------------------------------------------------------------------


def segment_with(sequence: int, column: int, value: float) -> SegmentRecord:
    """A segment whose `column` (0: priority, 1: return, 2: discount) holds `value` wherever a transition starts."""
    floats = np.frombuffer(BODY, "<f4", 3 * SPEC.slots).reshape(3, -1).copy()
    floats[column, floats[0] > 0] = value
    body = floats.tobytes() + BODY[floats.nbytes :]
    return segment(1, sequence)._replace(body=body, crc=zlib.crc32(body))


@pytest.mark.parametrize(("column", "reason"), [(0, "bad_priority"), (1, "bad_return"), (2, "bad_discount")])
def test_fault_39_a_value_beyond_what_rewards_allow_is_refused(served: Served, column: int, reason: str) -> None:
    limits, actor = value_limits(served.config), served.actor(1)
    most = (limits.priority, limits.n_step_return, limits.discount)[column]
    actor.send(
        segment_with(1, column, 1e38), segment_with(2, column, 1.01 * most), segment_with(3, column, 0.99 * most)
    )
    while actor.receive(SegmentAck).sequence < 3:
        pass
    assert served.server.experience.dropped[reason] == 2
    assert served.server.replay.buffer.inserted_segments == 1


def test_fault_39_a_journal_with_an_impossible_return_is_read_without_it(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    service, journal = served.server.experience, served.server.replay.journal
    message = segment_with(1, 1, 1e38)
    journal.on_segment(1, SegmentRecord(1, 1, 1, TRANSITIONS, message.body, message.crc))
    journal.flush(0.0)
    assert service.dropped["bad_return"] == 0
    served.restart()
    assert served.server.replay.buffer.size_segments == 0
    assert "segment 1 is left out: bad_return" in caplog.text
    stores_for(served, served.actor(2), 2, 1)


# Memory, log and ledger -------------------------------------------------------------------------------------------


def test_fault_39_segments_out_of_order_are_not_buffered_and_nothing_is_lost_when_they_are_resent(
    served: Served,
) -> None:
    peer = served.actor(1)
    peer.send(segment(1, 2), segment(1, 3))
    peer.receive(Rejoin)
    peer.receive(Rejoin)
    assert waiting_in(served.server.experience) == 0
    peer.send(hello(1))
    peer.receive(ActorWelcome)
    for sequence in (1, 2, 3):
        stores_for(served, peer, 1, sequence)


def test_fault_39_replies_to_an_actor_that_does_not_read_are_limited(served: Served) -> None:
    peer = served.peer("experience")
    peer.socket.set(zmq.RCVHWM, 1)
    peer.socket.set(zmq.RCVBUF, 4096)
    peer.socket.disconnect(served.config.addresses.experience[0])
    peer.socket.connect(served.config.addresses.experience[0])
    for peer_id in range(1, 601):
        peer.send(ActorHello(peer_id, CONFIG.compatibility_key, MOST_GAMES))
    peer.send(statistics(1, 1))
    served.until(lambda: served.server.experience.episodes.length.count)  # all that came before has been read
    assert served.server.replay.highest_actor_number < 400, "the welcomes that went out: the kernel takes some, too"


# Segments that only the learner looks into ------------------------------------------------------------------------


def test_fault_39_segments_without_pixels_are_excluded_after_the_learners_report(served: Served) -> None:
    actor, number = served.actor(1), SPEC.slots * 17
    stores_for(served, actor, 1, 1)
    damaged = segment_with(2, 0, 0.99 * value_limits(served.config).priority)
    body = damaged.body[:number] + b"x"  # sound columns: the server stores it, and draws nearly nothing else
    actor.send(damaged._replace(body=body, crc=zlib.crc32(body)))
    served.until(lambda: served.server.replay.buffer.inserted_segments == 2)
    assert (served.server.replay.buffer.sample([4], 0.0).indices // SPEC.slots == 1).all()
    hello = LearnerHello(5, served.config.compatibility_key, 0, batches_at_once=1, batch_size=4)
    address, capacity = served.config.addresses.sampling[0], served.server.replay.buffer.capacity_segments
    stream = AskingClient(served.context, address, SPEC, hello, capacity, groups=1)
    try:
        shares = [damaged_share(served, stream) for _ in range(10)]
    finally:
        stream.close()
    assert shares[5:] == [0] * 5  # the report may arrive before the first draw
    assert served.server.sampling.dropped["corrupt_segment"] == 1


def damaged_share(served: Served, stream: AskingClient) -> float:
    """Consumes messages up to the next batch; returns the share of the second segment in it."""
    share: list[float] = []

    def consume() -> bool:
        if (item := stream.next(0.0)) is not None:
            if isinstance(item.content, IndexBatches):
                stream.update_priorities(item, np.ones((1, 4), np.float32))
                share.append(float(np.mean(item.content.indices // SPEC.slots == 1)))
            stream.consumed(item)
        return bool(share)

    served.until(consume)
    return share[0]
