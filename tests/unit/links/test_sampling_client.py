"""The learner's client notices a lost replay server, rejects what it cannot use, and releases its thread and socket."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest
import zmq

from apex_jax.host.errors import RunError
from apex_jax.links import connection, sampling_client
from apex_jax.links.sampling_client import Segments
from apex_jax.segment_codec import encode_segment
from apex_jax.transport import monitor, sockets
from apex_jax.transport.messages import (
    ActorHello,
    CorruptSegments,
    Credit,
    IndexBatches,
    LearnerWelcome,
    Rejoin,
)
from tests.rigs.links import SPEC, segment_of, wait_until
from tests.rigs.sampling_link import (
    CAPACITY,
    AskingClient,
    B,
    FalseServer,
    K,
    L,
    Link,
    batches_of,
    hello_of,
    streamed,
)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the messages that the client has logged, without times."""
    records = [record for record in caplog.records if record.name in (connection.__name__, sampling_client.__name__)]
    return [record.getMessage().split(" after ")[0] for record in records]


# What is known of the server --------------------------------------------------------------------------------------


def test_a_server_that_dies_is_lost_once_and_joined_again_once(
    sampling: Link, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stream = sampling.stream()
    assert stream.peer_state == "connecting"
    server = sampling.server()
    server.until(lambda: stream.peer_state == "joined")
    assert stream.disconnects == 0
    server.close()
    wait_until(lambda: stream.peer_state == "lost")
    server = sampling.server()
    server.until(lambda: stream.peer_state == "joined")
    assert stream.disconnects == 1
    assert lines(caplog) == [
        f"joining the replay server at {sampling.address}",
        f"the replay server at {sampling.address} is lost: looking for it",
        "the replay server is back",
    ]


def test_idle_server_is_not_lost(sampling: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_client, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.05)
    server = sampling.server()
    stream = sampling.stream()
    server.until(lambda: stream.peer_state == "joined")
    until = time.monotonic() + 5
    server.until(lambda: time.monotonic() > until)
    assert stream.disconnects == 0
    wait_until(lambda: stream.disconnects == 1)  # nobody serves
    assert stream.peer_state == "lost"
    server.until(lambda: stream.peer_state == "joined")


# What is taken from it --------------------------------------------------------------------------------------------


def test_server_that_forgets_the_learner_again_and_again_does_not_grow_its_memory(
    sampling: Link, false_server: FalseServer
) -> None:
    stream = sampling.stream()
    false_server.welcome()
    for _ in range(20):
        false_server.send(batches_of(1))
        false_server.send(batches_of(1))
        false_server.send(Rejoin())
        false_server.welcome()
    false_server.send(batches_of(2))
    item = stream.next(5.0)
    assert item is not None
    assert isinstance(item.content, IndexBatches)
    assert item.content.indices.max() == 2, "what came before the newest welcome is void"
    assert stream.next(0.2) is None


def test_second_welcome_to_a_connection_makes_the_learner_join_on_a_new_one(
    sampling: Link, false_server: FalseServer, caplog: pytest.LogCaptureFixture
) -> None:
    stream = sampling.stream()
    false_server.welcome()
    first = false_server._identity
    false_server.send(LearnerWelcome(9, CAPACITY))  # for a repeated hello that a long stall has delayed
    false_server.welcome()
    assert false_server._identity != first
    assert (stream.peer_state, stream.disconnects, stream.next(0.0)) == ("joined", 1, None)
    assert lines(caplog) == [
        f"the replay server at {sampling.address} had forgotten this process meanwhile: joining it again"
    ]


def test_undecodable_segments_are_reported_and_blank_until_they_are_excluded(
    sampling: Link, false_server: FalseServer
) -> None:
    stream = sampling.stream()
    false_server.welcome()
    bodies = [encode_segment(segment_of(number), SPEC) for number in (1, 2, 3)]
    bodies[1] = bodies[1][: SPEC.slots * 17] + b"\xff\xff"  # sound columns, and then no pixels
    false_server.send(streamed(1, 2, 3, bodies=bodies))
    item = stream.next(5.0)
    assert item is not None
    assert isinstance(item.content, Segments)
    assert item.content.ring_slots.tolist() == [0, 1, 2]
    assert item.content.frames[:, 0, 0].tolist() == [1, 0, 3]
    assert item.content.columns["discount"].max(axis=1).tolist() == [np.float32(0.9), 0, np.float32(0.9)]
    assert stream.dropped == {"bad_frames": 1}
    false_server.until_received(
        lambda message: (
            isinstance(message, CorruptSegments)
            and (message.ring_slots.tolist(), message.generations.tolist()) == ([1], [2])
        )
    )
    stream.consumed(item)
    false_server.until_received(lambda message: isinstance(message, Credit) and message.segments == 3)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([streamed(1, 2, ring_slots=[0, CAPACITY])], "streams segments that do not fit the replay"),
        ([streamed(1, 2, ring_slots=[-1, 0])], "streams segments that do not fit the replay"),
        ([streamed(1, 2)._replace(body_bytes=np.array([5, 5], np.int32))], "streams segments that do not fit"),
        ([streamed(1, 2)._replace(body_bytes=np.array([-5, 5], np.int32))], "streams segments that do not fit"),
        ([batches_of(-1)], "sends batches that do not fit the replay"),
        ([batches_of(CAPACITY * L)], "sends batches that do not fit the replay"),
        ([batches_of(0, shape=(K, B + 1))], "sends batches that do not fit the replay"),
        ([batches_of(0)._replace(probabilities=np.full(K * B, np.nan))], "sends batches that do not fit"),
        ([batches_of(0)._replace(probabilities=np.full(K * B, 5e-324))], "sends batches that do not fit"),
        ([batches_of(0)._replace(size_transitions=0)], "sends batches that do not fit"),
        ([batches_of(0)] * 3, "sends more than it was given credit for"),
        ([ActorHello(1, "", 4)], "sent what is no message .unknown_kind: ActorHello does not belong on this socket"),
    ],
    ids=str,
)
def test_a_server_that_breaks_the_protocol_ends_the_learner_in_one_line(
    sampling: Link, false_server: FalseServer, monkeypatch: pytest.MonkeyPatch, messages: list[Any], message: str
) -> None:
    monkeypatch.setattr(sampling_client, "SEGMENTS_WINDOW", 2)
    stream = sampling.stream(groups=2)
    false_server.welcome()
    for each in messages:
        false_server.send(each)
    wait_until(lambda: stream.peer_state == "refused", false_server.read)
    with pytest.raises(RunError, match=f"^the replay server at {sampling.address} {message}") as caught:
        stream.next(5.0)
    assert str(caught.value).isprintable()


def test_server_that_sends_too_much_is_disconnected_unread_and_logged_once(
    sampling: Link, false_server: FalseServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor, "RECONNECT_SECONDS", 0.1)
    stream = sampling.stream()
    for number in (1, 2):
        false_server.welcome()
        false_server.send_frame(bytes(sockets.SMALL_MESSAGE_BYTES + sockets.ENCRYPTION_BYTES + 1))
        wait_until(lambda number=number: stream.dropped["too_large"] == number)  # type: ignore[misc]
    false_server.welcome()
    assert stream.disconnects == 2
    assert caplog.text.count("sent something too long for this run") == 1


def test_a_replay_of_another_capacity_ends_the_learner(sampling: Link) -> None:
    server = sampling.server(capacity=CAPACITY + 1)
    stream = sampling.stream()
    with pytest.raises(RunError, match=r"holds 7 segments, this learner 6: replay\.capacity_transitions"):
        server.until(lambda: stream.next(0.0))


@pytest.mark.parametrize("is_served", [True, False])
def test_close_ends_the_thread_and_releases_the_context(sampling: Link, is_served: bool) -> None:
    context = zmq.Context()
    stream = AskingClient(context, sampling.address, SPEC, hello_of(), CAPACITY, groups=2)
    if is_served:
        server = sampling.server()
        server.insert(1)
        server.until(lambda: stream.next(0.0))
    stream.close()
    assert not stream._thread.is_alive()
    context.term()
    assert context.closed
