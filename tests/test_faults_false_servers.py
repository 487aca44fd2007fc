"""Servers that lie to the clients that join them: every message is well formed, and what it says is not so."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from apex_jax.links import experience_client
from apex_jax.links.experience_client import ExperienceClient
from apex_jax.links.sampling_client import SamplingClient
from apex_jax.links.weights import WeightsSubscriber
from apex_jax.transport import sockets, wire
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    ActorWelcome,
    LearnerAlive,
    Rejoin,
    SegmentAck,
    SegmentMessage,
)
from tests import experience_link, sampling_link
from tests.links import CONFIG, SPEC, TRANSITIONS, free_address, segment_of, wait_until
from tests.weights_link import AGREEMENT, PARAMS


@pytest.mark.parametrize(
    "places", [[], [0], [0, 1, 2, 3, 4], [0, 1, 2, 8], [0, 1, 2, -1]], ids=["none", "few", "many", "beyond", "negative"]
)
def test_fault_26_an_actor_takes_no_places_that_are_not_on_the_ladder(
    experience: experience_link.Link, places: list[int]
) -> None:
    context = zmq.Context()
    with context, sockets.serve_experience(context, experience.address) as false_server:
        stream = experience.stream()  # of 4 environments
        welcome = ActorWelcome(1, np.array(places, np.int32), ladder_size=8, max_outstanding_segments=4)
        answer(false_server, welcome)
        wait_until(lambda: stream.dropped["bad_welcome"] == 1)
        assert stream.wait_for_welcome(0) is None
        answer(false_server, welcome._replace(places=np.arange(4, dtype=np.int32)))
        wait_until(lambda: stream.wait_for_welcome(0) is not None)


def test_fault_26_an_actor_keeps_what_it_never_sent_whatever_is_acknowledged(
    experience: experience_link.Link,
) -> None:
    context = zmq.Context()
    with context, sockets.serve_experience(context, experience.address) as false_server:
        stream = experience.stream()
        answer(false_server, ActorWelcome(1, np.arange(4, dtype=np.int32), ladder_size=8, max_outstanding_segments=1))
        for number in (1, 2):
            assert stream.put(segment_of(number), 10, timeout_seconds=10.0)
        assert answer(false_server, SegmentAck(2), to=SegmentMessage).sequence == 1
        wait_until(lambda: stream.dropped["bad_acknowledgement"] == 1)
        answer(false_server, SegmentAck(1))
        assert answer(false_server, SegmentAck(2), to=SegmentMessage).sequence == 2
        wait_until(lambda: stream._account["acknowledged"] == 2 * TRANSITIONS)


def test_fault_26_an_actor_takes_no_incarnation_that_it_could_not_say_again(
    experience: experience_link.Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experience_client, "HELLO_SECONDS", 0.05)
    context = zmq.Context()
    with context, sockets.serve_experience(context, experience.address) as false_server:
        stream = experience.stream()
        welcome = ActorWelcome(1, np.arange(4, dtype=np.int32), ladder_size=8, max_outstanding_segments=4)
        header, *frames = wire.encode(welcome)
        items = msgpack.unpackb(header)
        items[3] = 2**63 - 1  # its incarnation
        answer(false_server, [msgpack.packb(items), *frames], to=ActorHello)
        wait_until(lambda: stream.dropped["bad_field"] == 1 or stream.wait_for_welcome(0) is not None)
        answer(false_server, welcome, to=(ActorHello, ActorStatus))
        answer(false_server, Rejoin(), to=ActorStatus)
        assert answer(false_server, welcome, to=ActorHello).incarnation == 1
        assert stream.error is None
        assert stream.dropped == {"bad_field": 1}


def answer(false_server: zmq.Socket, message: Any, to: Any = (ActorHello, ActorStatus)) -> Any:
    """Sends a message, or frames, to the actor that says one of these next; returns what it said."""
    frames = message if isinstance(message, list) else wire.encode(message)
    while True:
        while (received := sockets.receive_from(false_server, wire.MESSAGES, Counter())) is None:
            assert false_server.poll(10_000), "the actor says nothing"
        if isinstance(received[1], to):
            false_server.send_multipart([received[0], *frames])
            return received[1]


@pytest.mark.parametrize("weight", [np.nan, np.inf, -1.0])
def test_fault_26_a_learner_takes_no_weight_that_would_spoil_its_network(
    sampling: sampling_link.Link, weight: float
) -> None:
    server = sampling.router()
    stream = sampling.stream()
    server.welcome()
    bad = sampling_link.batches_of(1)
    server.send(bad._replace(weights=np.full_like(bad.weights, weight)))
    wait_until(lambda: stream.dropped["bad_batches"] == 1)
    server.send(bad)
    items: list[Any] = []
    wait_until(lambda: (item := stream.next(0.0)) is not None and not items.append(item))  # type: ignore[func-returns-value]
    assert (items[0].content.weights == bad.weights).all()
    server.close()


class Endless:
    """In place of what reads from a socket: there is always one message more, until it is quiet."""

    def __init__(self, message: Any) -> None:
        self.is_quiet = threading.Event()
        self.given = 0
        self._message = message

    def __call__(self, *_: Any) -> tuple[bytes, Any] | None:
        if self.is_quiet.is_set():
            return None
        self.given += 1
        return b"", self._message


CLIENTS: dict[str, tuple[Any, Callable[[zmq.Context, str], Any]]] = {
    "learner": (
        sampling_link.streamed(),
        lambda context, address: SamplingClient(context, address, SPEC, sampling_link.hello_of(), 6, groups=2),
    ),
    "actor": (
        SegmentAck(0),
        lambda context, address: ExperienceClient(context, address, SPEC, ActorHello(1, CONFIG.agreement, 4), 2),
    ),
    "subscriber": (LearnerAlive(1), lambda context, address: WeightsSubscriber(context, address, PARAMS, AGREEMENT)),
}


@pytest.mark.parametrize("role", CLIENTS)
def test_fault_26_a_server_that_sends_without_end_keeps_no_client_from_leaving(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, make = CLIENTS[role]
    endless, context, address = Endless(message), zmq.Context(), free_address()
    monkeypatch.setattr(sockets, "_receive", endless)
    with context, sockets.serve_weights(context, address) as false_learner:
        client = make(context, address if role == "subscriber" else free_address())
        leaving = threading.Thread(target=client.close)
        try:
            enough = 4 * sockets.MESSAGES_AT_ONCE
            wait_until(lambda: endless.given > enough, lambda: sockets.send(false_learner, LearnerAlive(1)))
            leaving.start()
            wait_until(lambda: not leaving.is_alive())
            assert len(getattr(client, "_outbox", ())) < 10
            assert client.dropped["bad_segments"] == (endless.given if role == "learner" else 0)
        finally:
            endless.is_quiet.set()
            leaving.join() if leaving.ident else client.close()
