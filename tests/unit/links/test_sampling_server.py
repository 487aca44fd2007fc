"""The replay server streams live segments and batches to one learner, within its credit, and takes its priorities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from apex_jax.host.errors import RunError
from apex_jax.links import sampling_client, sampling_server
from apex_jax.links.sampling_client import Batches, Received, Segments
from apex_jax.segment_codec import encode_segment
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    ActorHello,
    CorruptSegments,
    Credit,
    Goodbye,
    IndexBatches,
    LearnerWelcome,
    Refusal,
    Rejoin,
    StreamedSegments,
)
from apex_jax.types import MAX_SAMPLES_PER_INSERT, PEER_TIMEOUT_SECONDS
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, segment_of, wait_until
from tests.rigs.sampling_link import (
    CAPACITY,
    B,
    FalseReplay,
    K,
    L,
    Learner,
    Link,
    Server,
    batches_of,
    hello_of,
    next_of,
    streamed,
)

# The stream -------------------------------------------------------------------------------------------------------


def test_a_learner_gets_all_live_segments_oldest_first_and_then_batches(sampling: Link) -> None:
    server = sampling.server()
    server.insert(CAPACITY + 3)
    server.replay.ledger.store(1, 1, 77, 9)
    learner = Learner(sampling.stream())
    server.until(lambda: learner.consume() and learner.batches)
    assert learner.history == list(range(4, CAPACITY + 4))
    content = learner.batches[0].content
    assert isinstance(content, Batches)
    assert content.indices.shape == content.weights.shape == (K, B)
    assert content.drawn.environment_steps == 77
    assert content.drawn.age_seconds == 1.0
    assert content.drawn.samples_per_insert == K * B / ((CAPACITY + 3) * TRANSITIONS - 1)


def test_server_sends_no_more_than_the_credit_allows(sampling: Link) -> None:
    server = sampling.server()
    server.insert(5)
    peer = sampling.peer(server, hello_of())
    assert peer.receives_nothing()
    peer.send(Credit(3, 1))
    assert len(peer.receive(StreamedSegments).ring_slots) == 3
    assert peer.receives_nothing(), "no batch before every live segment"
    peer.send(Credit(4, 1))
    assert peer.receive(StreamedSegments).ring_slots.tolist() == [3, 4]
    peer.receive(IndexBatches)
    peer.receive(IndexBatches)
    assert peer.receives_nothing()
    server.insert(3)
    assert peer.receive(StreamedSegments).ring_slots.tolist() == [5, 0]
    assert peer.receives_nothing()


def test_large_segments_travel_in_several_messages(sampling: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    body_bytes = len(encode_segment(segment_of(1), SPEC))
    monkeypatch.setattr(sampling_server, "BYTES_AT_ONCE", 2 * body_bytes)
    server = sampling.server()
    server.insert(5)
    peer = sampling.peer(server, hello_of())
    peer.send(Credit(99, 0))
    assert [peer.receive(StreamedSegments).ring_slots.tolist() for _ in range(3)] == [[0, 1], [2, 3], [4]]
    monkeypatch.setattr(sampling_server, "BYTES_AT_ONCE", 1)
    server.insert(2)
    assert [peer.receive(StreamedSegments).ring_slots.tolist() for _ in range(2)] == [[5], [0]]


def test_heartbeat_is_always_answered(sampling: Link) -> None:
    peer = sampling.peer(sampling.server(), hello_of())
    for _ in range(3):
        peer.send(Credit(0, 0))
        answer = peer.receive(Credit)
        assert (answer.segments, answer.draws) == (0, 0)
    peer.send(Credit(1, 1))
    assert peer.receives_nothing()


def test_ratio_too_large_for_a_message_is_sent_as_the_largest_one(sampling: Link) -> None:
    server = sampling.server()
    server.insert(1)
    server.limiter.sampled += 10**15  # as after months in which no actor sent anything
    peer = sampling.peer(server, hello_of())
    peer.send(Credit(9, 1))
    peer.receive(StreamedSegments)
    assert peer.receive(IndexBatches).samples_per_insert == MAX_SAMPLES_PER_INSERT


# Who may draw -----------------------------------------------------------------------------------------------------


def test_a_second_learner_waits_until_the_first_is_silent(sampling: Link) -> None:
    server = sampling.server()
    sampling.peer(server, hello_of(1))
    second = sampling.peer(server)
    second.send(hello_of(2))
    assert not second.receive(Refusal).final
    server.service.evict_dead_peers(PEER_TIMEOUT_SECONDS)
    second.send(hello_of(2))
    assert not second.receive(Refusal).final
    server.service.evict_dead_peers(PEER_TIMEOUT_SECONDS + 0.1)
    second.send(hello_of(2))
    second.receive(LearnerWelcome)


@pytest.mark.parametrize("batches", [CONFIG.learner.largest_sample // B + 1, 256])
def test_a_draw_larger_than_configured_is_refused_for_good(sampling: Link, batches: int) -> None:
    server = sampling.server()
    stream = sampling.stream(hello_of(batches=batches))
    with pytest.raises(RunError, match=rf"{batches} batches of {B} at once exceed the 32 transitions"):
        server.until(lambda: stream.next(0.0))
    assert server.service.learner is None


def test_reconnected_learner_starts_again(sampling: Link) -> None:
    server = sampling.server()
    server.insert(2)
    before = sampling.peer(server, hello_of(1))
    before.send(Credit(5, 5))
    before.receive(StreamedSegments)
    after = sampling.peer(server, hello_of(1))
    assert after.receives_nothing(), "the credit of the connection before is void"
    after.send(Credit(5, 0))
    assert after.receive(StreamedSegments).ring_slots.tolist() == [0, 1]


def test_repeated_hello_is_welcomed_once_and_gives_credit_once(sampling: Link) -> None:
    server = sampling.server()
    peer = sampling.peer(server, hello_of(1))
    peer.send(Credit(3, 2), hello_of(1))
    assert peer.receives_nothing()
    assert server.service.learner is not None
    assert (server.service.learner.draws_credit, server.service.learner.segments_credit) == (2, 3)


def test_server_gets_the_steps_of_the_run_from_its_learner(sampling: Link) -> None:
    server = sampling.server()
    peer = sampling.peer(server, hello_of(1, environment_steps=500))
    assert server.service.run_steps == 500
    peer.send(Credit(0, 0, 900), Goodbye())
    server.until(lambda: server.service.learner is None)
    assert server.service.run_steps == 900


@pytest.mark.parametrize("is_killed", [False, True])
def test_end_of_the_run_reaches_the_server_or_its_successor(sampling: Link, is_killed: bool) -> None:
    server = sampling.server()
    stream = sampling.stream()
    server.until(lambda: server.service.learner and stream.peer_state == "joined")
    stream.finish("1000 updates")
    if is_killed:
        wait_until(lambda: server.socket.poll(0))  # it has arrived, and is never read
        server.close()
        server = sampling.server()
    server.until(stream.is_finish_received.is_set)
    stream.close()
    server.until(lambda: server.service.learner is None)
    assert server.service.finished == "1000 updates"


def test_a_run_that_is_over_before_the_learner_is_welcomed_ends_the_server_too(sampling: Link) -> None:
    stream = sampling.stream()
    stream.finish("500 updates")  # the checkpoint had reached the limit
    server = sampling.server()
    server.until(stream.is_finish_received.is_set)
    assert server.service.finished == "500 updates"


# Priorities -------------------------------------------------------------------------------------------------------


def drawn(learner: Learner, server: Server) -> Received:
    """The next item of batches."""
    known = len(learner.batches)
    server.until(lambda: learner.consume() and len(learner.batches) > known)
    return learner.batches[-1]


def test_restart_of_the_server_restarts_the_stream_and_voids_old_priorities(sampling: Link) -> None:
    server = sampling.server()
    server.insert(4)
    learner = Learner(sampling.stream(hello_of(environment_steps=1000)))
    old = drawn(learner, server)
    learner.stream.environment_steps = 1234
    server.close()
    server = sampling.server()
    server.insert(2)
    server.until(lambda: learner.consume() and learner.history[-2:] == [1, 2])
    new = drawn(learner, server)
    assert new.epoch == old.epoch + 1
    learner.stream.update_priorities(old, np.full((K, B), 1e9, np.float32))
    learner.stream.update_priorities(new, np.full((K, B), 1e6, np.float32))
    server.until(lambda: server.buffer.max_priority == 1e6)
    assert +server.dropped == {}
    assert server.service.run_steps == 1234, "as the learner sends it to each server"


# What a client rejects ----------------------------------------------------------------------------------------------


def test_server_that_forgets_the_learner_again_and_again_does_not_grow_its_memory(
    sampling: Link, false_server: FalseReplay
) -> None:
    stream = sampling.stream()
    false_server.welcome()
    for _ in range(8):
        false_server.send(batches_of(1))
        false_server.send(batches_of(1))
        false_server.send(Rejoin())
        false_server.welcome()
    false_server.send(batches_of(2))
    item = next_of(stream)
    assert isinstance(item.content, Batches)
    assert item.content.indices.max() == 2, "what came before the newest welcome is void"
    assert stream.next(0.0) is None


def test_second_welcome_to_a_connection_makes_the_learner_join_on_a_new_one(
    sampling: Link, false_server: FalseReplay
) -> None:
    stream = sampling.stream()
    false_server.welcome()
    first = false_server.identity
    false_server.send(LearnerWelcome(CAPACITY))  # for a repeated hello that a long stall has delayed
    false_server.welcome()
    assert false_server.identity != first
    assert (stream.peer_state, stream.disconnects, stream.next(0.0)) == ("joined", 1, None)


def test_undecodable_segments_are_reported_and_blank_until_they_are_excluded(
    sampling: Link, false_server: FalseReplay
) -> None:
    stream = sampling.stream()
    false_server.welcome()
    bodies = [encode_segment(segment_of(number), SPEC) for number in (1, 2, 3)]
    bodies[1] = bodies[1][: SPEC.slots * 17] + b"\xff\xff"  # sound columns, and then no pixels
    false_server.send(streamed(1, 2, 3, bodies=bodies))
    item = next_of(stream)
    assert isinstance(item.content, Segments)
    assert item.content.ring_slots.tolist() == [0, 1, 2]
    assert item.content.frames[:, 0, 0].tolist() == [1, 0, 3]
    assert item.content.columns["discount"].max(axis=1).tolist() == [np.float32(0.9), 0, np.float32(0.9)]
    assert stream.dropped == {"bad_frames": 1}
    report = false_server.receive(CorruptSegments)
    assert (report.ring_slots.tolist(), report.generations.tolist()) == ([1], [2])
    stream.consumed(item)
    while false_server.receive(Credit).segments != 3:
        pass


@pytest.mark.parametrize("messages", [
    *([streamed(1, 2, ring_slots=slots)] for slots in ([0, CAPACITY], [-1, 0])),
    *([streamed(1, 2)._replace(body_bytes=np.array([first, 5], np.int32))] for first in (5, -5)),
    *([batches_of(index)] for index in (-1, CAPACITY * L)),
    [batches_of(0, shape=(K, B + 1))],
    *([batches_of(0)._replace(probabilities=np.full(K * B, value))] for value in (np.nan, 5e-324)),
    [batches_of(0)] * 5,  # more than there was credit for
    [ActorHello(1, "", 4)],
], ids=str)  # fmt: skip
def test_a_server_that_breaks_the_protocol_ends_the_learner_in_one_line(
    sampling: Link, false_server: FalseReplay, monkeypatch: pytest.MonkeyPatch, messages: list[Any]
) -> None:
    monkeypatch.setattr(sampling_client, "SEGMENTS_WINDOW", 2)
    stream = sampling.stream(draws=2)
    false_server.welcome()
    for each in messages:
        false_server.send(each)
    wait_until(lambda: stream.peer_state == "refused")
    with pytest.raises(RunError, match=f"^the replay server at {sampling.address} ") as caught:
        stream.next(0.0)
    assert str(caught.value).isprintable()


def test_server_that_sends_too_much_is_disconnected_unread(
    sampling: Link, false_server: FalseReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "RECONNECT_SECONDS", 0.1)
    stream = sampling.stream()
    for number in (1, 2):
        false_server.welcome()
        false_server.send([bytes(sockets.SMALL_MESSAGE_BYTES + sockets.ENCRYPTION_BYTES + 1)])
        wait_until(lambda number=number: stream.disconnects == number)  # type: ignore[misc]
    false_server.welcome()


def test_a_replay_of_another_capacity_ends_the_learner(sampling: Link) -> None:
    server = sampling.server(capacity=CAPACITY + 1)
    stream = sampling.stream()
    with pytest.raises(RunError, match=r"holds 7 segments, this learner 6: .*replay\.capacity_transitions"):
        server.until(lambda: stream.next(0.0))
