"""Servers that break the protocol, or send endlessly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq

from apex_jax.host.errors import RunError
from apex_jax.links.connection import LinkEnd
from apex_jax.links.experience_client import ExperienceClient
from apex_jax.links.sampling_client import SamplingClient
from apex_jax.links.weights_client import WeightsClient
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    ActorWelcome,
    Credit,
    LearnerWelcome,
    SegmentAck,
    WeightsOffer,
)
from tests.rigs import experience_link, sampling_link
from tests.rigs.links import CONFIG, SPEC, FalseServer, free_address, wait_until
from tests.rigs.weights_link import COMPATIBILITY_KEY, PARAMS

WELCOME = ActorWelcome(1, np.arange(4, dtype=np.int32), ladder_size=8, max_outstanding_segments=4)


def with_places(ladder_indices: list[int]) -> ActorWelcome:
    return WELCOME._replace(ladder_indices=np.array(ladder_indices, np.int32))


@pytest.mark.parametrize(("answers", "said"), [
    ([with_places([])], r"4 environments the places \[\]"),
    ([with_places([0, 1, 2, -1])], r"4 environments the places \[ 0  1  2 -1\]"),
    ([WELCOME, SegmentAck(2)], "segment 2"),
    ([LearnerWelcome(6)], "unknown_kind: LearnerWelcome"),
    ([[b"garbage"]], "not_msgpack"),
], ids=str)  # fmt: skip
def test_a_replay_server_that_breaks_the_protocol_ends_the_actor_in_one_line(
    experience: experience_link.Link, answers: list[Any], said: str
) -> None:
    context = zmq.Context()
    with context, sockets.serve("experience", context, experience.address) as socket:
        false_server, stream = FalseServer(socket), experience.stream()  # of 4 environments
        for message in answers:
            false_server.receive(ActorHello, ActorStatus)
            false_server.send(message)
        assert stream.finished.wait(20)
        assert isinstance(stream.error, RunError)
        assert str(stream.error).isprintable()
        with pytest.raises(RunError, match=f"{experience.address}.*{said}"):
            raise stream.error
        assert stream.peer_state == "refused"


class Endless:
    """Replaces the receive function: there is always another message, until `quiet` is set."""

    def __init__(self, message: Any) -> None:
        self.is_quiet = threading.Event()
        self.given = 0
        self._message = message

    def __call__(self, *_: Any) -> Any:
        if self.is_quiet.is_set():
            return None
        self.given += 1
        return self._message


CLIENTS: dict[str, tuple[Any, Callable[[zmq.Context, str], Any]]] = {
    "learner": (
        Credit(0),
        lambda context, address: SamplingClient(LinkEnd(context, address), SPEC, sampling_link.hello_of(), 6, 2, 0.4),
    ),
    "actor": (
        SegmentAck(0),
        lambda context, address: ExperienceClient(
            LinkEnd(context, address), SPEC, ActorHello(1, CONFIG.compatibility_key, 4), 2
        ),
    ),
    "client of weights": (
        WeightsOffer(1, 0, False),
        lambda context, address: WeightsClient(LinkEnd(context, address), PARAMS, COMPATIBILITY_KEY),
    ),
}


@pytest.mark.parametrize("role", CLIENTS)
def test_fault_26_endless_messages_of_a_server_do_not_keep_a_client_from_leaving(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, make = CLIENTS[role]
    endless, context = Endless(message), zmq.Context()
    monkeypatch.setattr(sockets, "receive", endless)
    with context:
        client = make(context, free_address())
        leaving = threading.Thread(target=client.close)
        try:
            enough = 4 * sockets.MESSAGES_AT_ONCE
            wait_until(lambda: endless.given > enough)
            leaving.start()
            wait_until(lambda: not leaving.is_alive())
        finally:
            endless.is_quiet.set()
            leaving.join() if leaving.ident else client.close()
