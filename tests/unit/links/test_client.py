"""What the three clients share: a thread that takes turns until it is closed, and leaves in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import zmq

from apex_jax.host.errors import RunError
from apex_jax.links.client import LinkClient
from apex_jax.links.connection import Connection, Patience
from apex_jax.transport import sockets

DEADLINE_SECONDS = 30.0


class Caller(LinkClient):
    """Does what the test says in each turn, and writes down what happens."""

    def __init__(self, context: zmq.Context, in_turn: Callable[[], None] = lambda: None) -> None:
        super().__init__(Connection("server", "ipc://nobody", None, Patience(10.0)))
        self.in_turn = in_turn
        self.turned, self.failed = threading.Event(), threading.Event()
        self.events: list[str] = []
        self.error: RunError | None = None
        self._start(partial(sockets.connect_weights, context, "ipc://nobody"), "caller")

    def turn(self, now_seconds: float) -> None:
        self.in_turn()
        self.turned.set()

    def _leave(self, socket: zmq.Socket) -> None:
        self.events.append("left" if not socket.closed else "left too late")

    def _fail(self, error: RunError) -> None:
        self.error = error
        self.failed.set()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_client_takes_turns_until_it_is_closed_and_leaves_before_its_socket_closes(context: zmq.Context) -> None:
    caller = Caller(context)
    assert caller.turned.wait(DEADLINE_SECONDS)
    caller.close()
    assert caller.events == ["left"]
    assert caller.error is None


def test_an_error_of_a_turn_reaches_the_threads_that_wait_and_no_goodbye_is_sent(context: zmq.Context) -> None:
    def refused() -> None:
        raise RunError("refused by the server")

    caller = Caller(context, refused)
    assert caller.failed.wait(DEADLINE_SECONDS)
    caller.close()
    assert str(caller.error) == "refused by the server"
    assert caller.peer_state == "refused"
    assert caller.events == []


def test_a_client_shows_the_state_of_its_connection(context: zmq.Context) -> None:
    caller = Caller(context)
    assert (caller.name, caller.peer_state, caller.disconnects) == ("the server at ipc://nobody", "connecting", 0)
    caller.dropped["unusable"] += 1
    assert caller.dropped == {"unusable": 1}
    caller.close()
