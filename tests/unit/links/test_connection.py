"""A client's connection sends hellos and heartbeats, and decides when its server is joined, lost, back or refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_jax.host.errors import RunError
from apex_jax.links import connection
from apex_jax.links.connection import Connection, LinkEnd, Patience
from apex_jax.run.identity import RunIdentity
from apex_jax.transport.messages import Refusal, Rejoin

PATIENCE = Patience(silent=5.0, heartbeat=1.0)
TICK_SECONDS = 0.25
WELCOME = "welcome"


class FalseLink:
    """The socket, its monitor and the server of a connection, as a test sets them."""

    def __init__(self) -> None:
        self.is_connected = True
        self.cause = "refused"
        self.is_full = False  # the socket accepts nothing
        self.pending: list[Any] = []  # messages, or an error that reading raises
        self.sent: list[tuple[float, Any]] = []  # time, message
        self.reconnects = self.closed = 0
        self.now_seconds = 100.0

    def send(self, _: Any, message: Any) -> bool:
        if not self.is_full:
            self.sent.append((self.now_seconds, message))
        return not self.is_full

    def receive_some(self, *_: Any) -> Iterator[Any]:
        while self.pending:
            message = self.pending.pop(0)
            if isinstance(message, Exception):
                raise message
            yield message

    def check(self) -> None:
        pass

    def reconnect(self) -> None:
        self.reconnects += 1

    def __enter__(self) -> FalseLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed += 1


class Client:
    """A connection over a false link, and the loop of its client, at times that a test sets."""

    def __init__(
        self, patience: Patience = PATIENCE, run: RunIdentity | None = None, away_limit_seconds: float = 0.0
    ) -> None:
        self.link = FalseLink()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "ClientMonitor", lambda: self.link)
            end = LinkEnd(None, "tcp://fleet:5550", run, away_limit_seconds)  # type: ignore[arg-type]
            self.connection = Connection("replay server", end, patience)
        self.connection._socket = self.link  # type: ignore[assignment]

    def turn(self, seconds: float = TICK_SECONDS, *messages: Any) -> list[Any]:
        """Returns what arrived in one turn of the loop, `seconds` after the last one."""
        link = self.link
        link.now_seconds += seconds
        link.pending += messages
        received = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "sockets", link)
            self.connection.turn(link.now_seconds, lambda: "hello", lambda: "heartbeat")
            for message in self.connection.receive(link.now_seconds, ()):
                received.append(message)
                if message == WELCOME:
                    self.connection.join(link.now_seconds, "")
        return received

    def turns(self, seconds: float) -> None:
        """Turns the loop for this time, in which nothing arrives."""
        for _ in range(round(seconds / TICK_SECONDS)):
            self.turn()

    def joined(self) -> Client:
        self.turn(TICK_SECONDS, WELCOME)
        assert self.connection.state == "joined"
        self.link.sent.clear()
        return self

    def messages_sent(self) -> list[Any]:
        """Returns the messages that were sent since the last call."""
        messages = [message for _, message in self.link.sent]
        self.link.sent.clear()
        return messages


def test_hellos_are_sent_until_the_welcome_and_then_heartbeats_at_the_same_interval() -> None:
    client = Client()
    client.turns(4.0)
    assert client.messages_sent() == ["hello"] * 4
    assert not client.connection.send("segment")
    client.turn(TICK_SECONDS, WELCOME)
    assert client.messages_sent() == ["hello"]
    assert client.connection.state == "joined"
    client.turns(4.0)
    assert client.messages_sent() == ["heartbeat"] * 4


def test_broken_connection_is_a_loss_logged_once_until_the_server_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client = Client().joined()
    client.link.is_connected = False
    client.turn()
    assert (client.connection.state, client.connection.disconnects) == ("lost", 1)
    assert client.messages_sent() == ["hello"], "at once"
    assert not client.connection.send("segment")
    client.turns(60.0)
    client.link.is_connected = True
    client.turn(TICK_SECONDS, WELCOME)
    assert (client.connection.state, client.connection.disconnects) == ("joined", 1)
    assert [record.getMessage() for record in caplog.records] == [
        "the replay server at tcp://fleet:5550 is lost: looking for it",
        "the replay server is back after 60 s",
    ]


def test_silent_server_is_lost_and_its_connection_replaced_at_each_timeout() -> None:
    client = Client().joined()
    client.turns(PATIENCE.silent)
    assert client.connection.state == "joined"
    client.turn()
    assert (client.connection.state, client.link.reconnects) == ("lost", 1)
    client.turns(3 * (PATIENCE.silent + TICK_SECONDS))
    assert (client.connection.disconnects, client.link.reconnects) == (1, 4)


def test_pause_of_the_client_does_not_count_as_silence_of_the_server() -> None:
    client = Client().joined()
    for _ in range(3):
        client.turn(1000.0)
        client.turns(PATIENCE.silent)
    assert (client.connection.state, client.connection.disconnects) == ("joined", 0)
    client.turn()
    assert client.connection.state == "lost"


@pytest.mark.parametrize("was_joined", [False, True])
def test_unreachable_server_ends_the_client_after_the_limit(was_joined: bool) -> None:
    client = Client(away_limit_seconds=60.0)
    if was_joined:
        client.joined()
    client.link.is_connected = False
    client.turns(60.0)
    with pytest.raises(RunError, match=r"the replay server at tcp://fleet:5550 .* 60 s .refused."):
        client.turns(2 * TICK_SECONDS)


def test_refusal_ends_the_client_if_it_is_final_or_lasts_too_long() -> None:
    with pytest.raises(RunError, match=r"the replay server at tcp://fleet:5550: 'other \\x1bgame'$"):
        Client().turn(1.0, Refusal("other \x1bgame", final=True))
    client = Client(PATIENCE._replace(refused_limit=30.0))
    for _ in range(31):
        client.turn(1.0, Refusal("no place", final=False))
    with pytest.raises(RunError, match="no place"):
        client.turn(1.0, Refusal("no place", final=False))


def test_server_of_another_run_ends_the_client() -> None:
    client = Client()
    client.connection.run.adopt("0" * 16, "the learner")
    with pytest.raises(RunError, match="the replay server at tcp://fleet:5550 is of run ffffffffffffffff"):
        client.connection.join(0.0, "f" * 16)


def test_loss_of_a_server_that_may_end_is_not_logged_counted_or_limited(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(away_limit_seconds=1.0).joined()
    client.connection.server_may_end = True
    client.link.is_connected = False
    client.turns(4.0)
    assert (client.connection.state, client.connection.disconnects, caplog.messages) == ("lost", 0, [])
    assert client.messages_sent() == ["hello"] * 4, "its successor may welcome this client"
    client.connection.server_may_end = False
    with pytest.raises(RunError, match="has been away"):
        client.turn()


@pytest.mark.parametrize(("error", "errors"), [
    (None, []),
    (RunError("over"), ["over"]),
    (KeyError("a bug"), ["the link to the replay server at tcp://fleet:5550 failed: 'a bug'"]),
])  # fmt: skip
def test_socket_is_closed_and_every_error_of_the_loop_is_reported(error: Exception | None, errors: list[str]) -> None:
    client = Client()
    reported: list[RunError] = []

    def loop() -> None:
        with client.connection.open(lambda monitor: client.link, reported.append):  # type: ignore[arg-type, return-value]
            if error is not None:
                raise error

    if isinstance(error, KeyError):
        with pytest.raises(KeyError):
            loop()
    else:
        loop()
    assert client.link.closed == 2, "the socket and its monitor"
    assert client.connection.state == ("connecting" if error is None else "refused")
    assert [str(each) for each in reported] == errors


EVENTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.25, 0.9, 1.5]),  # seconds since the last turn
        st.booleans() | st.just(True),  # whether it is connected
        st.sampled_from([None, None, "ack", WELCOME, Rejoin(), Refusal("no place", final=False)]),
    ),
    max_size=60,
)


@given(events=EVENTS)
@settings(deadline=None, max_examples=60)
def test_in_any_order_of_events_losses_are_counted_and_only_a_joined_server_gets_more_than_hellos(
    events: list[Any],
) -> None:
    client = Client()
    losses, last_message = 0, client.link.now_seconds
    for seconds, client.link.is_connected, message in events:
        before, client.link.sent = client.connection.state, []
        last_message = client.link.now_seconds + seconds if seconds > connection.STOOD_STILL_SECONDS else last_message
        client.turn(seconds, *([message] if message is not None else []))
        state, sent = client.connection.state, client.messages_sent()
        is_gone = not client.link.is_connected or client.link.now_seconds - last_message > PATIENCE.silent
        losses += before == "joined" and (is_gone or message == Rejoin())
        is_refused = before == "refused" and not is_gone and message != WELCOME
        assert client.connection.disconnects == losses
        assert len(sent) <= 1
        assert sent in ([], ["heartbeat"] if before == "joined" and not is_gone else ["hello"])
        assert (state == "refused") == (isinstance(message, Refusal) or is_refused)
        assert (state == "joined") >= (message == WELCOME)
        assert (state == "connecting") <= (before == "connecting")
        last_message = client.link.now_seconds if message is not None else last_message
