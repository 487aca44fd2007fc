"""The three links as ZMQ sockets, with options set where ZMQ's defaults do not suit them.

experience  actors (DEALER) <-> replay server (ROUTER): segments and statistics up, acknowledgements down
sampling    learner (DEALER) <-> replay server (ROUTER): credit, priorities up; segments, index batches down, in order
weights     actors and evaluator (DEALER) <-> learner (ROUTER): requests up; parameters down

No socket is shared between threads. `send` and `receive` never block. The socket's context determines whether a tcp
link is encrypted, see `apex_jax.transport.security`; an optional monitor counts and logs refused connections.
ZMQ's heartbeats are off: libzmq 4.3.5 aborts the process (`!_io_error`) when a heartbeat is due or unread on a
connection that broke behind a full queue. Each link has heartbeat messages of its own instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import os
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from apex_jax.host.errors import RunError, UsageError
from apex_jax.transport import wire
from apex_jax.transport.addresses import check_path_is_free
from apex_jax.transport.security import LINKS, secure
from apex_jax.types import MAX_SEGMENT_BYTES, MAX_WEIGHTS_BYTES

MESSAGES_AT_ONCE = 256  # maximum per turn, before other links are read and replies are sent
READING_TURN_SECONDS = 0.02  # time limit of a reading turn; the costs of messages differ by a factor of thousands
LOST_PEER_MILLISECONDS = 10_000  # after which the connection to a host that acknowledges no packet is closed
LONGEST_RECONNECT_MILLISECONDS = 1_000  # between two attempts to reach a server
HANDSHAKE_MILLISECONDS = 10_000  # timeout, after which an incomplete connection is closed
SMALL_MESSAGE_BYTES = wire.MAX_HEADER_BYTES  # headers, acknowledgements, ladder indices, requests
ENCRYPTION_BYTES = 64  # CURVE adds 33 bytes to a frame
# Receive queue of a server, per connection: more than an actor's default credit, because ZMQ stops reading a connection
# whose queue is full; less than ZMQ's default of 1,000, which unknown clients could fill.
UNREAD_MESSAGES = 128
# Send queue per client. A welcome of an actor has up to 16 KiB, and a peer may never read; a client of weights requests
# one version at a time.
UNREAD_REPLIES = {"experience": 128, "weights": 16}
# The largest message of a link to its server, and to its clients.
LARGEST_UP = {"experience": MAX_SEGMENT_BYTES, "sampling": MAX_SEGMENT_BYTES, "weights": SMALL_MESSAGE_BYTES}
LARGEST_DOWN = {"experience": SMALL_MESSAGE_BYTES, "sampling": MAX_SEGMENT_BYTES, "weights": MAX_WEIGHTS_BYTES}


class BindError(RunError):
    """A server cannot bind its address; the message names the address and the remedy."""


def serve(
    link: str, context: zmq.Context, address: str, monitor: ServerMonitor | None = None, max_message_bytes: int = 0
) -> zmq.Socket:
    """Binds the server's end of a link.

    `max_message_bytes`: largest message from a client in this run, such as a segment; 0 = LARGEST_UP.
    """
    # libzmq numbers connections starting from C `rand()`, unseeded, and aborts the process (`ok`, socket_base.cpp) if a
    # peer has already chosen the next number as its routing id. A random seed makes the next number unpredictable.
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.ROUTER_MANDATORY, 1)  # a missing peer or full queue is an error, not a silent drop
    socket.set(zmq.RCVHWM, UNREAD_MESSAGES)
    if link in UNREAD_REPLIES:
        socket.set(zmq.SNDHWM, UNREAD_REPLIES[link])
    return _open(socket, address, link, monitor, max_message_bytes or LARGEST_UP[link], is_server=True)


def connect(
    link: str, context: zmq.Context, address: str, monitor: ClientMonitor | None = None, max_message_bytes: int = 0
) -> zmq.Socket:
    """Connects a client's end of a link; ZMQ reconnects automatically while the socket is open.

    `max_message_bytes`: largest message from the server in this run, such as the params; 0 = LARGEST_DOWN.
    """
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IMMEDIATE, 1)  # queue no messages before a connection is established
    _open(socket, address, link, monitor, max_message_bytes or LARGEST_DOWN[link], is_server=False)
    if link == "experience":  # on a slow line, an actor's queued messages, goodbye included, take about a second
        socket.set(zmq.LINGER, 2_000)
    return socket


def send(socket: zmq.Socket, message: Any, connection_id: bytes | None = None) -> bool:
    """Sends a message without blocking, from a ROUTER to `connection_id`. Returns False if the peer takes none now."""
    frames = wire.encode(message)
    return _send_frames(socket, frames if connection_id is None else [connection_id, *frames])


def _send_frames(socket: zmq.Socket, frames: list[Any]) -> bool:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):  # this connection has ended
            return False
        raise
    return True


def receive(socket: zmq.Socket, expected: tuple[type, ...]) -> Any | None:
    """Returns the next pending message, or None.

    Raises WireError if it is malformed or not in `expected`: no apex_jax server sends such a message.
    """
    try:
        frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return wire.decode(frames, expected)


def receive_some(socket: zmq.Socket, expected: tuple[type, ...]) -> Iterator[Any]:
    """Yields pending messages like `receive`, at most MESSAGES_AT_ONCE, since more may arrive without end."""
    for _ in range(MESSAGES_AT_ONCE):
        message = receive(socket, expected)
        if message is None:
            return
        yield message


def reading_turn(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Yields once for each message that a server may read before its other work continues.

    A turn ends after MESSAGES_AT_ONCE messages, or with the message during which READING_TURN_SECONDS ran out.
    """
    end_seconds = clock() + READING_TURN_SECONDS
    for _ in range(MESSAGES_AT_ONCE):
        yield
        if clock() >= end_seconds:
            return


def receive_from(socket: zmq.Socket, expected: tuple[type, ...], dropped: Counter[str]) -> tuple[bytes, Any] | None:
    """Returns (connection_id, message) of the next valid message on a ROUTER, or None.

    Skips messages that are malformed or not in `expected`, at most MESSAGES_AT_ONCE, and counts them in `dropped` by
    reason.
    """
    for _ in range(MESSAGES_AT_ONCE):
        try:
            connection_id, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        try:
            return connection_id.bytes, wire.decode(frames, expected)
        except wire.WireError as error:
            dropped[error.reason] += 1
            if (refusal := wire.encode_refusal(error)) is not None:
                _send_frames(socket, [connection_id.bytes, *refusal])  # otherwise that peer would wait forever
    return None


def _tune(socket: zmq.Socket, max_message_bytes: int) -> None:
    """Sets the options that must be set before bind or connect."""
    socket.set(zmq.LINGER, 200)  # milliseconds; the default can block the exit forever
    # By default, a peer can announce a message of any size and so make us allocate it. The limit must admit any header.
    socket.set(zmq.MAXMSGSIZE, max(max_message_bytes, SMALL_MESSAGE_BYTES) + ENCRYPTION_BYTES)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.BACKLOG, 1024)  # a fleet of actors may connect at once
    socket.set(zmq.TCP_KEEPALIVE, 1)  # closes a dead connection that was idle
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 4)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 2)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.set(zmq.TCP_MAXRT, LOST_PEER_MILLISECONDS)  # closes a dead connection with unacknowledged data
    socket.set(zmq.CONNECT_TIMEOUT, 5_000)
    socket.set(zmq.RECONNECT_IVL, 100)
    socket.set(zmq.RECONNECT_IVL_MAX, LONGEST_RECONNECT_MILLISECONDS)


def _open(
    socket: zmq.Socket, address: str, link: str, monitor: Monitor | None, max_message_bytes: int, is_server: bool
) -> zmq.Socket:
    """Binds or connects a socket, and returns it. Raises BindError, RunError or UsageError after closing it."""
    _tune(socket, max_message_bytes)
    try:
        secure(socket, link, address, is_server)
        if monitor is not None:
            monitor.attach(socket, link, address)
        if not is_server:
            socket.connect(address)
            return socket
        if address.startswith("ipc://") and not address.startswith("ipc://@"):
            check_path_is_free(address.removeprefix("ipc://"))  # ZMQ would replace a live server's socket
        socket.bind(address)
    except (OSError, zmq.ZMQError, UsageError) as error:
        if monitor is not None:
            monitor.close()
        socket.close()
        if isinstance(error, UsageError):
            raise
        where, reason = f"addresses.{link}={address}", error.strerror or error
        if is_server:
            raise BindError(f"{where} cannot be served: {reason}; choose a free address of this machine") from None
        raise RunError(f"{where} cannot be joined: {reason}; give the address of its server") from None
    return socket


class WakeUp:
    """Lets one thread wake another one that polls sockets."""

    def __init__(self, context: zmq.Context) -> None:
        self.socket = context.socket(zmq.PAIR)  # polled by the woken thread
        self._sender = context.socket(zmq.PAIR)
        address = f"inproc://wake-up-{id(self)}"
        self.socket.bind(address)
        self._sender.connect(address)

    def wake_up(self) -> None:
        """Wakes the other thread, now or at its next poll; does nothing once closed."""
        with contextlib.suppress(zmq.Again):  # full: the thread will be woken anyway
            if not self._sender.closed:
                self._sender.send(b"", zmq.NOBLOCK)

    def clear(self) -> None:
        """Discards the pending wake-ups."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.socket.recv(zmq.NOBLOCK)

    def close(self) -> None:
        """Closes both ends; the other thread must have ended."""
        for socket in (self._sender, self.socket):
            socket.close(linger=0)


LONGEST_TMPDIR = 71  # bytes; a Unix socket's path has at most 107


class LocalLinks:
    """ipc addresses for the links within one machine, in a new directory with a short path."""

    def __init__(self) -> None:
        """Creates the directory, accessible to this user only, in TMPDIR, or in /tmp if that is long."""
        usual = tempfile.gettempdir()
        parent = usual if len(os.fsencode(usual)) <= LONGEST_TMPDIR else "/tmp"
        self._directory = tempfile.TemporaryDirectory(prefix="apex-jax-", dir=parent)
        self.experience, self.sampling, self.weights = (
            f"ipc://{os.path.join(self._directory.name, link)}" for link in ("experience", "sampling", "weights")
        )

    def close(self) -> None:
        """Removes the directory."""
        self._directory.cleanup()


# The monitors of the sockets ----------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)

GIVE_UP_SECONDS = 10.0  # handshakes that fail for this long, and that only a user can fix, end in RunError
GAP_SECONDS = 5.0  # without a failure, after which the next one counts as a new problem
RECONNECT_SECONDS = 1.0  # after the loss of a connection that ZMQ does not restore
REPORT_SECONDS = 60.0  # between two log lines of a server

_FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "failed_handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "failed_handshake",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused_key",
}
_EVENTS_OF_A_SERVER = sum(_FAILURES)
_EVENTS_OF_A_CLIENT = _EVENTS_OF_A_SERVER | (
    zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
)
_NAMES = {"replay": "replay server"}  # of roles, in messages to users

_numbers = itertools.count()


class Monitor:
    """The events of a socket; used only by the socket's thread, and closed before the socket."""

    _events = 0

    def __init__(self) -> None:
        self._socket: zmq.Socket | None = None
        self._pair: zmq.Socket | None = None
        self._link = self._address = ""

    def attach(self, socket: zmq.Socket, link: str, address: str) -> None:
        """Starts monitoring a socket, which must not be bound or connected yet."""
        self._socket, self._link, self._address = socket, link, address
        name = f"inproc://monitor-{next(_numbers)}"
        socket.monitor(name, self._events)
        self._pair = socket.context.socket(zmq.PAIR)
        self._pair.set(zmq.LINGER, 0)
        self._pair.set(zmq.RCVHWM, 0)  # unlimited: strangers could fill a limited queue, which blocks ZMQ's I/O thread
        self._pair.connect(name)

    def close(self) -> None:
        """Stops monitoring."""
        if self._socket is not None and self._pair is not None:
            self._socket.disable_monitor()
            self._pair.close()
            self._socket = self._pair = None

    def _new_events(self) -> Iterator[tuple[int, int]]:
        """Yields (event, value) of each event since the last call."""
        while self._pair is not None:
            try:
                frames = self._pair.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield struct.unpack("=Hi", frames[0])


class ServerMonitor(Monitor):
    """Counts the connections that a server refuses, and logs them at most once a minute."""

    _events = _EVENTS_OF_A_SERVER

    def __init__(self) -> None:
        super().__init__()
        self._unlogged: Counter[str] = Counter()
        self._next_report = 0.0

    def count(self, dropped: Counter[str]) -> None:
        """Adds the connections refused since the last call to `dropped`, as "refused_key" and "failed_handshake"."""
        for event, _ in self._new_events():
            dropped[_FAILURES[event]] += 1
            self._unlogged[_FAILURES[event]] += 1
        now = time.monotonic()
        if self._unlogged and now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            counts = ", ".join(f"{count} {reason}" for reason, count in self._unlogged.items())
            what = "connections refused on the %s link at %s, with a wrong key or of another protocol: %s"
            _log.warning(what, self._link, self._address, counts)
            self._unlogged.clear()


class ClientMonitor(Monitor):
    """Tells whether a server is connected, and why not; reconnects. Raises RunError if a server refuses the key.

    An unreachable server is not an error: the client retries indefinitely.
    """

    _events = _EVENTS_OF_A_CLIENT

    def __init__(self) -> None:
        super().__init__()
        self.is_connected = False  # connected, with a successful handshake
        self.cause = ""  # of the newest failure: "refused" (as by a closed port), "no answer" or "wrong key"
        self._given_up_seconds: float | None = None  # when the connection was lost; None while ZMQ reconnects by itself
        self._last_event = 0
        self._is_logged = False
        self._first_failure = self._last_failure = -GAP_SECONDS  # of handshakes

    def check(self) -> None:
        """Processes new events, and reconnects if ZMQ does not.

        Raises RunError after `GIVE_UP_SECONDS` of a refused key.
        """
        now = time.monotonic()
        for event, value in self._new_events():
            self._on_event(event, value, now)
        if self._given_up_seconds is not None and now - self._given_up_seconds >= RECONNECT_SECONDS:
            self.reconnect()  # ZMQ itself does so after every network error, but not after an oversized message

    def _on_event(self, event: int, value: int, now: float) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_connected, self.cause, self._is_logged = True, "", False
            self._first_failure = self._last_failure = -GAP_SECONDS
        elif event in _FAILURES:
            self._on_failure(event, value, now)
        elif event == zmq.EVENT_DISCONNECTED:
            self.is_connected, self._given_up_seconds = False, now
        else:  # connected, or ZMQ reconnects by itself
            self._given_up_seconds = None
            if event == zmq.EVENT_CONNECT_RETRIED and self._last_event != zmq.EVENT_DISCONNECTED:
                self.cause = "refused"
        self._last_event = event

    def _on_failure(self, event: int, value: int, now: float) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value in (errno.EAGAIN, errno.ETIMEDOUT):
            self.cause = "no answer"
            return
        self.cause = "wrong key"
        if now - self._last_failure > GAP_SECONDS:
            self._first_failure = now
        self._last_failure, seconds = now, now - self._first_failure
        server = LINKS[self._link].server
        what = f"the {_NAMES.get(server, server)} at {self._address}: wrong key"
        fix = f"compare the files of security.keys here and there, or correct addresses.{self._link}"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and seconds >= GIVE_UP_SECONDS:
            raise RunError(f"{what}: {fix} (tried for {seconds:.0f} s)")
        if seconds > 0 and not self._is_logged:  # a server that is being replaced fails once
            self._is_logged = True
            _log.warning("%s, or a proxy of an absent server: %s; trying again", what, fix)

    def reconnect(self) -> None:
        """Replaces the connection by a new one."""
        assert self._socket is not None
        self._given_up_seconds, self.is_connected = None, False
        with contextlib.suppress(zmq.ZMQError):  # already disconnected
            self._socket.disconnect(self._address)
        self._socket.connect(self._address)
