"""Peers with a valid key that attack the run with well-formed messages: false content, names of others, floods."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from apex_jax.links.connection import LinkEnd
from apex_jax.links.sampling_client import SEGMENTS_WINDOW, Batches, SamplingClient
from apex_jax.run.metrics import read_metrics, resident_memory_bytes
from apex_jax.segment_codec import value_limits
from apex_jax.transport import sockets, wire
from apex_jax.transport.messages import (
    ActorHello,
    ActorWelcome,
    Credit,
    EpisodeStatistics,
    Goodbye,
    IndexBatches,
    LearnerHello,
    Refusal,
    SegmentAck,
    StreamedSegments,
)
from apex_jax.types import MAX_COUNT, MAX_ENVIRONMENT_STEPS, SegmentRecord
from tests.fuzz.targets import fuzz_config
from tests.fuzz.tcp import frame, open_behind_the_handshake
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, highest, waiting_in
from tests.rigs.served import BODY, Served, segment, stores_for

MOST_GAMES = 4096  # in one message


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(fuzz_config(tmp_path))
    yield served
    served.close()


@pytest.fixture
def full(served: Served) -> Served:
    """One whose rate limiter allows no insert."""
    served.server.replay.limiter.can_insert = lambda *_: False  # type: ignore[method-assign]
    return served


def statistics(number: int) -> EpisodeStatistics:
    """Games with epsilons in all bands."""
    epsilon = np.linspace(0, 1, number, dtype=np.float32)
    arrays = epsilon, np.ones(number, np.float32), np.ones(number, np.int32)
    return EpisodeStatistics(*arrays, "", np.zeros((number, 0), np.float32))


# One client's work, and the turns of the others -------------------------------------------------------------------


def test_fault_39_backlog_of_slow_messages_does_not_starve_the_learner(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, learner = served.actor(1), served.learner()
    stores_for(served, actor, 1, 1)
    learner.send(Credit(10, 1))
    learner.receive(StreamedSegments)
    learner.receive(IndexBatches)
    monkeypatch.setattr(sockets, "READING_TURN_SECONDS", 0.0, raising=False)  # one message takes a whole turn
    experience, sampling = served.server.experience_socket, served.server.sampling_socket
    serve, learner.meanwhile = learner.meanwhile, lambda: None
    for _ in range(20):
        actor.socket.send_multipart(wire.encode(statistics(1)))
    learner.send(Credit(10, 1))
    assert experience.poll(10_000)
    assert sampling.poll(10_000)
    serve()
    learner.receive(IndexBatches)
    assert served.server.experience.episodes.means.counts["charts/episodic_length"] < 20


# Names of others --------------------------------------------------------------------------------------------------


def hello(peer_id: int, acknowledged: int = 0) -> ActorHello:
    return ActorHello(peer_id, CONFIG.compatibility_key, 4, acknowledged)


def test_fault_39_actor_rejoins_after_a_false_claim_in_its_name(served: Served) -> None:
    actor = served.actor(1)
    stores_for(served, actor, 1, 1)
    actor.send(Goodbye())
    served.until(lambda: not served.server.experience.actors)
    served.actor(1, acknowledged=MAX_COUNT)
    actor.send(hello(1, acknowledged=1))
    actor.receive(ActorWelcome)
    stores_for(served, actor, 1, 2)
    assert served.server.replay.buffer.inserted_segments == 2


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


# Memory, log and ledger -------------------------------------------------------------------------------------------


def test_fault_39_replies_to_an_actor_that_does_not_read_are_limited(served: Served) -> None:
    peer = served.peer("experience")
    peer.socket.set(zmq.RCVHWM, 1)
    peer.socket.set(zmq.RCVBUF, 4096)
    peer.socket.disconnect(served.config.addresses.experience)
    peer.socket.connect(served.config.addresses.experience)
    for peer_id in range(1, 601):
        peer.send(ActorHello(peer_id, CONFIG.compatibility_key, MOST_GAMES))
    peer.send(statistics(1))
    counts = served.server.experience.episodes.means.counts
    served.until(lambda: counts["charts/episodic_length"])  # all that came before has been read
    welcomed = served.server.replay.ledger.highest_actor_number
    assert welcomed < 400, "the welcomes that went out: the kernel takes some, too"


# Segments that only the learner looks into ------------------------------------------------------------------------


def test_fault_39_segments_without_pixels_are_excluded_after_the_learners_report(served: Served) -> None:
    actor, number = served.actor(1), SPEC.slots * 17
    stores_for(served, actor, 1, 1)
    damaged = segment_with(2, 0, 0.99 * value_limits(served.config).priority)
    body = damaged.body[:number] + b"x"  # sound columns: the server stores it, and draws nearly nothing else
    actor.send(damaged._replace(body=body, crc=zlib.crc32(body)))
    served.until(lambda: served.server.replay.buffer.inserted_segments == 2)
    assert (served.server.replay.buffer.sample(1, 4, 0.0).indices // SPEC.slots == 1).all()
    hello = LearnerHello(5, served.config.compatibility_key, 0, batches_at_once=1, batch_size=4)
    address, capacity = served.config.addresses.sampling, served.server.replay.buffer.capacity_segments
    stream = SamplingClient(LinkEnd(served.context, address), SPEC, hello, capacity, 1, 0.4)
    try:
        shares = [damaged_share(served, stream) for _ in range(10)]
    finally:
        stream.close()
    assert shares[5:] == [0] * 5  # the report may arrive before the first draw
    assert served.server.sampling.dropped["corrupt_segment"] == 1


def damaged_share(served: Served, stream: SamplingClient) -> float:
    """Consumes messages up to the next batch; returns the share of the second segment in it."""
    share: list[float] = []

    def consume() -> bool:
        if (item := stream.next(0.0)) is not None:
            if isinstance(item.content, Batches):
                stream.update_priorities(item, np.ones((1, 4), np.float32))
                share.append(float(np.mean(item.content.indices // SPEC.slots == 1)))
            stream.consumed(item)
        return bool(share)

    served.until(consume)
    return share[0]


# Counters that grow beyond what they can hold ---------------------------------------------------------------------


def test_fault_26_largest_step_counts_of_a_learner_and_an_actor_overflow_no_counter(
    served: Served, tmp_path: Path
) -> None:
    served.learner(environment_steps=MAX_ENVIRONMENT_STEPS).send(Credit(10, 2))
    actor = served.actor(1)
    actor.send(segment(1, 1, produced=MAX_COUNT))
    stores_for(served, actor, 1, 2)
    served.server.write_metrics()
    assert read_metrics(tmp_path / "metrics" / "replay.jsonl")[-1]["replay/actors"] == 1


@pytest.mark.parametrize("link", ["experience", "sampling"])
def test_fault_26_compatibility_key_with_unprintable_characters_does_not_end_the_server(
    served: Served, link: str
) -> None:
    peer, compatibility_key = served.peer(link), "\x01\u200b" * 256
    hello = (
        ActorHello(1, compatibility_key, 4)
        if link == "experience"
        else LearnerHello(1, compatibility_key, 0, 1, batch_size=4)
    )
    peer.send(hello)
    reason = peer.receive(Refusal).reason
    assert reason.isprintable()
    assert reason.endswith("; make them equal")


def test_fault_26_largest_sequence_numbers_do_not_damage_the_journal(served: Served) -> None:
    last = highest(SegmentRecord, "sequence")
    stores_for(served, served.actor(1, acknowledged=last - 1), 1, last)
    stores_for(served, served.actor(2), 2, 1)
    served.restart()
    assert served.server.replay.buffer.inserted_segments == served.server.replay.buffer.size_segments == 2
    assert served.server.replay.ledger.totals()["stored"] == 2 * TRANSITIONS


@pytest.mark.parametrize("announced_bytes", [2**20, 2**31])  # a segment of this run has some 200 bytes
@pytest.mark.parametrize("link", ["experience", "sampling"])
def test_fault_28_message_that_no_peer_of_the_run_would_send_is_refused_before_it_arrives(
    served: Served, link: str, announced_bytes: int
) -> None:
    port = int(getattr(served.config.addresses, link).rpartition(":")[2])
    before = resident_memory_bytes()
    for _ in range(20):
        with open_behind_the_handshake(port, b"") as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(frame(bytes(1000), announced_bytes=announced_bytes))
            while stranger.recv(4096):  # until the server closes the connection
                pass
    assert resident_memory_bytes() - before < 2**25
    stores_for(served, served.actor(1), 1, 1)


# Memory that somebody else fills ----------------------------------------------------------------------------------


def test_fault_26_new_peer_ids_on_one_connection_do_not_grow_the_queues(full: Served) -> None:
    peer, credit = full.peer("experience"), full.config.actor.max_outstanding_segments
    for peer_id in range(1, 101):
        peer.send(ActorHello(peer_id, full.config.compatibility_key, 4))
        peer.receive(ActorWelcome)
        peer.send(*(segment(peer_id, sequence) for sequence in range(1, credit + 1)))
    full.until(lambda: waiting_in(full.server.experience) == credit)
    assert len(full.server.experience.actors) == 1
    peer.send(ActorHello(1, full.config.compatibility_key, 4))  # which still has the segments that were discarded
    peer.receive(ActorWelcome)
    del full.server.replay.limiter.can_insert  # type: ignore[method-assign]
    stores_for(full, peer, 1, 1)


def test_fault_26_endless_credit_does_not_cause_endless_work(served: Served) -> None:
    learner = served.learner()
    for _ in range(100):
        learner.send(Credit(2**20, 2**13))
    served.until(lambda: not served.server.sampling_socket.poll(10))
    peer = served.server.sampling.learner
    assert peer is not None
    assert SEGMENTS_WINDOW <= peer.segments_credit <= 2**13
    assert peer.draws_credit <= 2**13


# Values that are well formed and wrong ----------------------------------------------------------------------------


def test_fault_26_extreme_statistics_do_not_break_a_line_of_metrics(served: Served, tmp_path: Path) -> None:
    actor = served.actor(1)
    arrays = np.ones(1, np.float32), np.ones(1, np.float32), np.array([2**31 - 1], np.int32)
    sound = EpisodeStatistics(*arrays, "level", np.ones((1, 1), np.float32))
    for value in (np.inf, np.nan, 3.4e38, -3.4e38):
        one = np.array([value], np.float32)
        actor.send(sound._replace(exploration=one, episode_return=one), sound._replace(exploration=one))
        actor.send(sound._replace(episode_return=one))
    actor.send(
        sound._replace(exploration=np.array([-0.001], np.float32)),
        sound._replace(exploration=np.array([1.001], np.float32)),
    )
    actor.send(*(sound._replace(episode_steps=np.array([steps], np.int32)) for steps in (-1, -(2**31))))
    stores_for(served, actor, 1, 1)
    served.server.write_metrics()
    [line] = read_metrics(tmp_path / "metrics" / "replay.jsonl")
    assert line["replay/dropped_bad_statistics"] == 4 + 4 + 2 + 2 + 2
    assert np.isfinite(line["charts/episodic_return"])
    assert line["charts/episodic_length"] == 2**31 - 1
