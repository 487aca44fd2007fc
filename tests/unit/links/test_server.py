"""What the three servers share: who is read, who must join first, who is refused, and who is evicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from apex_jax.links.server import LinkServer
from apex_jax.run.identity import RunIdentity
from apex_jax.transport import sockets
from apex_jax.transport.messages import Goodbye, Refusal, Rejoin, WeightsHello
from apex_jax.types import PEER_TIMEOUT_SECONDS

OURS, OTHERS = "a" * 16, "b" * 16


@dataclass
class Guest:
    seen_seconds: float


class Greeter(LinkServer[Guest]):
    """Lets everybody join whose configuration and run are its own."""

    def __init__(self, socket: zmq.Socket, run: RunIdentity, max_peers: int) -> None:
        self.guests: dict[bytes, Guest] = {}
        super().__init__(("the greeter", "this guest"), socket, "key=1", run, self.guests, max_peers)
        self.goodbyes = 0
        self._handlers = {WeightsHello: self._on_hello, Goodbye: self._on_goodbye}

    def _on_hello(self, identity: bytes, message: WeightsHello, now_seconds: float) -> None:
        if (refusal := self._refusal(message.compatibility_key, message.run_identity)) is not None:
            sockets.send(self._socket, refusal, identity)
        else:
            self.guests[identity] = Guest(now_seconds)

    def _on_goodbye(self, identity: bytes, message: Goodbye, now_seconds: float) -> None:
        self.goodbyes += 1

    def _evict(self, identity: bytes) -> None:
        del self.guests[identity]


class Meeting:
    """A greeter, and guests that the test controls, over real sockets of this process."""

    def __init__(self, context: zmq.Context, run: RunIdentity) -> None:
        self._context = context
        self._guests: list[zmq.Socket] = []  # which stay open until the context ends
        self._router = context.socket(zmq.ROUTER)
        self._router.bind("inproc://meeting")
        self.greeter = Greeter(self._router, run, max_peers=2)

    def guest(self) -> zmq.Socket:
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect("inproc://meeting")
        self._guests.append(dealer)
        return dealer

    def joined(self, now_seconds: float = 0.0) -> zmq.Socket:
        guest = self.guest()
        sockets.send(guest, WeightsHello("key=1", "digest"))
        self.greeter.read(now_seconds)
        return guest


def answer(guest: zmq.Socket, kind: type) -> Refusal | Rejoin:
    assert guest.poll(10_000)
    [message] = sockets.receive_some(guest, (kind,))
    assert isinstance(message, Refusal | Rejoin)
    return message


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    run = RunIdentity(str(tmp_path))
    run.adopt(OURS, "the test")
    context = zmq.Context()
    yield Meeting(context, run)
    context.destroy(linger=0)


def test_a_peer_without_a_record_must_join_first(meeting: Meeting) -> None:
    stranger = meeting.guest()
    sockets.send(stranger, Goodbye(1))
    meeting.greeter.read(0.0)
    assert isinstance(answer(stranger, Rejoin), Rejoin)
    assert meeting.greeter.goodbyes == 0


@pytest.mark.parametrize(
    ("hello", "reason", "words"),
    [
        (WeightsHello("key=2", ""), "another_config", "the greeter [key=1], this guest [key=2]; make them equal"),
        (WeightsHello("key=1", "", OTHERS), "another_run", f"this guest is of run {OTHERS}, the greeter of run {OURS}"),
    ],
    ids=["another configuration", "another run"],
)
def test_a_peer_of_another_configuration_or_run_is_refused_for_good(
    meeting: Meeting, hello: WeightsHello, reason: str, words: str
) -> None:
    guest = meeting.guest()
    sockets.send(guest, hello)
    meeting.greeter.read(0.0)
    refusal = answer(guest, Refusal)
    assert isinstance(refusal, Refusal)
    assert refusal.final
    assert words in refusal.reason
    assert meeting.greeter.dropped == {reason: 1}
    assert not meeting.greeter.guests


def test_a_peer_of_the_same_run_or_of_none_yet_joins(meeting: Meeting) -> None:
    for run in ("", OURS):
        sockets.send(meeting.guest(), WeightsHello("key=1", "", run))
    meeting.greeter.read(0.0)
    assert len(meeting.greeter.guests) == 2


def test_a_peer_is_evicted_once_it_has_been_silent_for_the_timeout(meeting: Meeting) -> None:
    meeting.joined()
    alive = meeting.joined()
    sockets.send(alive, Goodbye(1))
    meeting.greeter.read(PEER_TIMEOUT_SECONDS)
    meeting.greeter.evict_dead_peers(PEER_TIMEOUT_SECONDS)
    assert len(meeting.greeter.guests) == 2
    meeting.greeter.evict_dead_peers(PEER_TIMEOUT_SECONDS + 0.1)
    assert len(meeting.greeter.guests) == 1


def test_nobody_is_evicted_while_its_heartbeat_may_be_pending_but_a_flood_protects_nobody(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting.joined()
    flooding = meeting.joined()
    monkeypatch.setattr(sockets, "MESSAGES_AT_ONCE", 1)
    late_seconds = PEER_TIMEOUT_SECONDS + 1
    for number in range(1, 6):  # two peers can have at most so many unread heartbeats as there are peers, twice over
        sockets.send(flooding, Goodbye(1))
        sockets.send(flooding, Goodbye(1))
        meeting.greeter.read(late_seconds)
        meeting.greeter.evict_dead_peers(late_seconds)
        assert len(meeting.greeter.guests) == (2 if number <= 4 else 1)
