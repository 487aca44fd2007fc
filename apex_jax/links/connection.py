"""A client's connection to its server: the only module that decides whether the server is joined, lost or back."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import zmq

from apex_jax.host.errors import RunError, printable
from apex_jax.run.identity import RunIdentity
from apex_jax.transport import sockets
from apex_jax.transport.messages import Refusal, Rejoin
from apex_jax.transport.sockets import ClientMonitor
from apex_jax.transport.wire import WireError

_log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
STOOD_STILL_SECONDS = 1.0  # between two turns; a longer pause means that this process was stopped or starved


class LinkEnd(NamedTuple):
    """One end of a link, as a process joins or serves it."""

    context: zmq.Context
    address: str
    run: RunIdentity | None = None  # of this process, which adopts the server's if it has none yet; None = any
    away_limit_seconds: float = 0.0  # how long the server may be unreachable before a RunError; 0 = forever


class Patience(NamedTuple):
    """Timeouts of a client, in seconds."""

    silent: float  # without a message, after which the server counts as lost
    refused_limit: float = 0.0  # how long the server may refuse this client before a RunError; 0 = forever
    heartbeat: float = 0.0  # between two hellos or heartbeats; 0 = HEARTBEAT_SECONDS


class Connection:
    """Joins a server and stays joined: sends hellos until the server welcomes this client, then heartbeats.

    The server answers every hello and heartbeat. A server whose connection breaks, or which sends nothing for too long,
    is lost; the client then reconnects until the server is back. `state` is one of

        connecting  no server has welcomed this client yet
        joined      a server has welcomed this client and is connected
        lost        the server that had welcomed or refused this client is unreachable or silent
        refused     a server refuses this client, finally or for now

    apex_jax servers never violate the protocol: a malformed or unexpected message raises RunError.
    """

    def __init__(self, server: str, end: LinkEnd, patience: Patience):
        """`server`: its name for users, such as "replay server"."""
        self.state = "connecting"
        self.disconnects = 0  # losses of servers that had welcomed this client
        self.dropped: Counter[str] = Counter()
        self.server_may_end = False  # the run is over, so a loss of the server is not logged, counted or limited
        self.transfer_seconds = 0.0  # more silence is allowed: no heartbeat passes a large message on its way
        self.name = f"the {server} at {end.address}"
        self.run = end.run or RunIdentity()
        self._away_limit_seconds = end.away_limit_seconds
        self._patience = patience._replace(heartbeat=patience.heartbeat or HEARTBEAT_SECONDS)
        self._monitor = ClientMonitor()
        self._socket: zmq.Socket | None = None
        self._since_seconds: float | None = None  # when `state` last changed; None before the first turn
        self._received_seconds = 0.0  # time of the last message, or of the connection
        self._turn_seconds = 0.0
        self._next_heartbeat = 0.0

    @contextlib.contextmanager
    def open(
        self, connect: Callable[[ClientMonitor], zmq.Socket], on_error: Callable[[RunError], None]
    ) -> Iterator[zmq.Socket]:
        """Opens and closes the socket around the loop of a client's thread.

        Passes every exception of the loop to `on_error`; threads that wait for this client would otherwise hang.
        """
        try:
            with connect(self._monitor) as self._socket, contextlib.closing(self._monitor):
                yield self._socket
        except RunError as error:
            self.state = "refused"
            on_error(error)
        except Exception as error:
            self.state = "refused"
            on_error(RunError(f"the link to {self.name} failed: {error}"))
            raise

    def turn(self, now_seconds: float, hello: Callable[[], Any], heartbeat: Callable[[], Any]) -> None:
        """Updates the state of the connection, and sends a hello or a heartbeat when one is due.

        Raises RunError if the server can never be joined, or a limit is reached.
        """
        if self._since_seconds is None:
            self._since_seconds = self._received_seconds = self._turn_seconds = now_seconds
        if now_seconds - self._turn_seconds > STOOD_STILL_SECONDS:  # this process stalled: pending messages are unread
            self._received_seconds = now_seconds
        self._turn_seconds = now_seconds
        was_connected = self._monitor.is_connected
        self._monitor.check()
        if self._monitor.is_connected and not was_connected:
            self._received_seconds = now_seconds
        silent_seconds = now_seconds - self._received_seconds - self.transfer_seconds
        has_answered = self.state in ("joined", "refused")
        if has_answered and not self._monitor.is_connected:
            self._lose(now_seconds, f"{self.name} is lost: looking for it")
        elif has_answered and silent_seconds > self._patience.silent:
            self._lose(now_seconds, f"{self.name} has been silent for {silent_seconds:.0f} s: looking for it")
        if self._monitor.is_connected and silent_seconds > self._patience.silent:
            self._monitor.reconnect()  # the connection may be dead without a tcp error
            self._received_seconds = now_seconds
        if not self.server_may_end:
            self._check_limits(now_seconds)
        if now_seconds >= self._next_heartbeat and self._send(heartbeat() if self.state == "joined" else hello()):
            self._next_heartbeat = now_seconds + self._patience.heartbeat

    def receive(self, now_seconds: float, expected: tuple[type, ...]) -> Iterator[Any]:
        """Yields pending messages, at most MESSAGES_AT_ONCE; handles `Refusal` and `Rejoin` itself.

        Raises RunError for a final refusal, and for messages that no apex_jax server sends.
        """
        assert self._socket is not None
        try:
            for message in sockets.receive_some(self._socket, (*expected, Rejoin, Refusal)):
                self._received_seconds = now_seconds
                if isinstance(message, Refusal):
                    self._on_refusal(message, now_seconds)
                elif isinstance(message, Rejoin):
                    self._on_rejoin(now_seconds)
                else:
                    yield message
        except WireError as error:
            if error.version is not None:
                raise RunError(f"{self.name} cannot be understood: {error.detail}") from None
            raise self.broken(f"sent what is no message ({error})") from None

    def send(self, message: Any) -> bool:
        """Sends a message; returns False if the server is not joined or cannot take it now."""
        return self.state == "joined" and self._send(message)

    def join(self, now_seconds: float, run_identity: str) -> None:
        """Enters the state "joined" after a welcome. Raises RunError if the server is part of another run."""
        self._monitor.check()  # reads the connect event: without it, the new connection looks lost
        self.run.adopt(run_identity, self.name)
        if self.state == "lost":
            _log.info("%s is back after %.0f s", self.name.split(" at ")[0], now_seconds - (self._since_seconds or 0.0))
        self._enter("joined", now_seconds)

    def start_over(self, now_seconds: float) -> None:
        """Joins again on a new connection, on which no message for an earlier welcome can be under way."""
        self._lose(now_seconds, f"{self.name} had forgotten this process meanwhile: joining it again")
        self._monitor.reconnect()
        self._received_seconds = now_seconds

    def send_heartbeat(self) -> None:
        """Makes the next heartbeat or hello due now."""
        self._next_heartbeat = 0.0

    def broken(self, what: str) -> RunError:
        """Returns the error for a server that violates the protocol. `what`: its violation."""
        return RunError(f"{self.name} {what}: it is not a server of this release; run the same release everywhere")

    def _send(self, message: Any) -> bool:
        assert self._socket is not None
        return sockets.send(self._socket, message)

    def _enter(self, state: str, now_seconds: float) -> None:
        self.state, self._since_seconds = state, now_seconds

    def _lose(self, now_seconds: float, text: str) -> None:
        was_joined = self.state == "joined"
        self._enter("lost", now_seconds)
        self.send_heartbeat()
        if not self.server_may_end:
            self.disconnects += was_joined
            _log.warning("%s", text)

    def _check_limits(self, now_seconds: float) -> None:
        away_seconds = now_seconds - (self._since_seconds or 0.0)
        if self.state in ("connecting", "lost") and 0 < self._away_limit_seconds < away_seconds:
            what = f"{self.name} has been away for {away_seconds:.0f} s ({self._monitor.cause or 'no answer'})"
            raise RunError(f"{what}: start it, or raise away_limit_seconds (0 = wait for ever)")

    def _on_rejoin(self, now_seconds: float) -> None:
        if self.state == "joined":
            self._lose(now_seconds, f"{self.name} no longer knows this process: joining it again")

    def _on_refusal(self, message: Refusal, now_seconds: float) -> None:
        reason = printable(message.reason)
        refused_seconds = now_seconds - (self._since_seconds or 0.0) if self.state == "refused" else 0.0
        if message.final or 0 < self._patience.refused_limit < refused_seconds:
            raise RunError(f"refused by {self.name}: {reason}")
        self.dropped["refused"] += 1
        if self.state != "refused":
            self._monitor.check()  # see `join`
            _log.warning("%s; retrying until it has a place", reason)
            self._enter("refused", now_seconds)


# Parts common to the clients of the three links: the thread that holds the connection --------------------------------


class LinkClient:
    """A connection, and a thread that takes turns at it until `close`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.name = connection.name  # of the server for users, with its address
        self.dropped = connection.dropped  # counts of refusals, and of messages that could not be sent or used
        self._closing = threading.Event()
        self._thread: threading.Thread  # see `_start`

    @property
    def peer_state(self) -> str:
        """State of the server, see `Connection`."""
        return self._connection.state

    @property
    def disconnects(self) -> int:
        """Losses of servers that had welcomed this client."""
        return self._connection.disconnects

    def turn(self, now_seconds: float) -> None:
        """Sends a hello or heartbeat if one is due, and queued messages; handles received messages."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the thread, which leaves the server with a goodbye."""
        self._closing.set()
        self._thread.join()

    def _start(self, connect: Callable[[ClientMonitor], zmq.Socket], name: str) -> None:
        """Starts the thread; the last step of a subclass's `__init__`."""
        self._thread = threading.Thread(target=self._run, args=(connect,), name=name)
        self._thread.start()

    def _run(self, connect: Callable[[ClientMonitor], zmq.Socket]) -> None:
        with self._connection.open(connect, self._fail) as socket:
            while not self._closing.is_set():
                self._wait(socket)
                self.turn(time.monotonic())
            self._leave(socket)

    def _wait(self, socket: zmq.Socket) -> None:
        """Returns once there is something to do, or after a tenth of a second at most."""
        socket.poll(100)

    def _leave(self, socket: zmq.Socket) -> None:
        """Sends the last messages."""

    def _drop(self, reason: str, text: str) -> None:
        """Counts what could not be sent or used; logs the text for the first of its reason."""
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            _log.warning("%s", text)

    def _fail(self, error: RunError) -> None:
        """Makes the error known to the threads that wait for this client."""
        raise NotImplementedError
