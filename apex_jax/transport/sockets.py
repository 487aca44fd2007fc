"""The three links as ZMQ sockets, with the options that ZMQ's defaults get wrong for them.

experience  actors (DEALER) <-> replay server (ROUTER): segments and statistics up, acknowledgements down
sampling    learner (DEALER) <-> replay server (ROUTER): credit, priorities up; segments, index batches down, in order
weights     actors and evaluator (DEALER) <-> learner (ROUTER): requests up; parameters, in pieces, down

No socket is shared between threads, and nothing here waits: `send` and `receive` return at once. Over tcp a link is
encrypted as its context says, see `apex_jax.transport.security`; a monitor, where one is given, tells who was refused.
No link has ZMQ's heartbeats: libzmq 4.3.5 aborts the process (`!_io_error`) where one is due, or left to be read, on a
connection that broke behind a full queue. The messages of each link have signs of life instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from apex_jax.errors import RunError, UsageError
from apex_jax.transport import wire
from apex_jax.transport.addresses import check_path_is_free
from apex_jax.transport.messages import MAX_ARRAY_SIZE, WEIGHTS_PIECE_BYTES
from apex_jax.transport.monitor import ClientMonitor, Monitors, ServerMonitor
from apex_jax.transport.security import secure
from apex_jax.types import MAX_SEGMENT_BYTES

MESSAGES_AT_ONCE = 256  # read before all else gets its turn: another link, or what is to be sent
READING_TURN_SECONDS = 0.02  # after which no further message is read: some take thousands of times as long as others
MALFORMED_AT_ONCE = 256  # skipped before the caller gets its turn: a flood of garbage must not take all of it
LOST_PEER_MILLISECONDS = 10_000  # a host that answers no packet (cable, power) is given up about then
LONGEST_RECONNECT_MILLISECONDS = 1_000  # between two attempts to reach a server that is away
HANDSHAKE_MILLISECONDS = 10_000  # a connection that has not become one of ours by then is closed
WEIGHTS_PIECES_AT_ONCE = 4  # that a client of weights asks for ahead: 1 MiB, 10 MB/s over 100 ms
SMALL_MESSAGE_BYTES = wire.MAX_HEADER_BYTES  # headers, acknowledgements, places on the ladder, requests
ENCRYPTION_BYTES = 64  # CURVE makes a frame 33 bytes longer
# From one connection, that a server has yet to read: more than an actor has credit for by default, as a connection
# whose queue is full is not read. ZMQ would take 1,000 of a stranger.
UNREAD_MESSAGES = 128
UNREAD_REPLIES = 128  # that wait for an actor, each with places of up to 16 KiB: a peer may read none


class BindError(RunError):
    """An address cannot be served from here; the message names it and says what to do."""


def serve_experience(
    context: zmq.Context, address: str, monitor: ServerMonitor | None = None, max_message_bytes: int = MAX_SEGMENT_BYTES
) -> zmq.Socket:
    """Binds the replay server's end of the experience link. `max_message_bytes`: of a segment of this run."""
    socket = _router(context)
    socket.set(zmq.SNDHWM, UNREAD_REPLIES)
    return _bind(socket, address, "experience", monitor, max_message_bytes)


def connect_experience(context: zmq.Context, address: str, monitor: ClientMonitor | None = None) -> zmq.Socket:
    """Connects an actor to the replay server; ZMQ reconnects by itself for as long as the socket lives."""
    # What an actor has under way when it leaves, its last word among it, takes a second or so on a slow line.
    return _connect(_dealer(context), address, "experience", monitor, SMALL_MESSAGE_BYTES, linger_milliseconds=2_000)


def serve_sampling(
    context: zmq.Context,
    address: str,
    monitor: ServerMonitor | None = None,
    max_message_bytes: int = 4 * MAX_ARRAY_SIZE,
) -> zmq.Socket:
    """Binds the replay server's end of the sampling link. `max_message_bytes`: of the priorities of a draw."""
    return _bind(_router(context), address, "sampling", monitor, max_message_bytes)


def connect_sampling(
    context: zmq.Context, address: str, monitor: ClientMonitor | None = None, max_message_bytes: int = MAX_SEGMENT_BYTES
) -> zmq.Socket:
    """Connects the learner to the replay server. `max_message_bytes`: of its streamed segments, or of a draw."""
    return _connect(_dealer(context), address, "sampling", monitor, max_message_bytes)


def serve_weights(context: zmq.Context, address: str, monitor: ServerMonitor | None = None) -> zmq.Socket:
    """Binds the learner's end of the weights link."""
    socket = _router(context)
    # ZMQ learns late, and by halves, of what a client has read; beside pieces there are offers.
    socket.set(zmq.SNDHWM, 4 * WEIGHTS_PIECES_AT_ONCE)
    return _bind(socket, address, "weights", monitor, SMALL_MESSAGE_BYTES)


def connect_weights(context: zmq.Context, address: str, monitor: ClientMonitor | None = None) -> zmq.Socket:
    """Connects a client of weights to the learner."""
    return _connect(_dealer(context), address, "weights", monitor, WEIGHTS_PIECE_BYTES)


def send(socket: zmq.Socket, message: Any, identity: bytes | None = None) -> bool:
    """Sends a message if the peer can take it now (to `identity`, from a ROUTER); returns whether it could."""
    frames = wire.encode(message)
    return _send_frames(socket, frames if identity is None else [identity, *frames])


def _send_frames(socket: zmq.Socket, frames: list[Any]) -> bool:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):  # the peer behind this identity has gone
            return False
        raise
    return True


def receive(socket: zmq.Socket, expected: tuple[type, ...]) -> Any | None:
    """Returns the next message that is waiting, or None.

    WireError for one that is malformed, or of a kind not in `expected`: no server of ours sends such a message.
    """
    try:
        frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return wire.decode(frames, expected)


def receive_some(socket: zmq.Socket, expected: tuple[type, ...]) -> Iterator[Any]:
    """Yields the messages that are waiting, at most MESSAGES_AT_ONCE: more may come for ever; else like `receive`."""
    for _ in range(MESSAGES_AT_ONCE):
        message = receive(socket, expected)
        if message is None:
            return
        yield message


def reading_turn(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Yields once for each message that a server may read before all else gets its turn.

    A turn ends after MESSAGES_AT_ONCE messages, or with the message during which READING_TURN_SECONDS ran out.
    """
    end_seconds = clock() + READING_TURN_SECONDS
    for _ in range(MESSAGES_AT_ONCE):
        yield
        if clock() >= end_seconds:
            return


def receive_from(socket: zmq.Socket, expected: tuple[type, ...], dropped: Counter[str]) -> tuple[bytes, Any] | None:
    """Returns (identity, message) of the next message waiting on a ROUTER; None if there is none, or nothing but noise.

    What is malformed, or of a kind not in `expected`, is skipped, MALFORMED_AT_ONCE at most, and counted in `dropped`
    by reason.
    """
    for _ in range(MALFORMED_AT_ONCE):
        try:
            identity, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        try:
            return identity.bytes, wire.decode(frames, expected)
        except wire.WireError as error:
            dropped[error.reason] += 1
            if (refusal := wire.encode_refusal(error)) is not None:
                _send_frames(socket, [identity.bytes, *refusal])  # without it that peer would wait for ever
    return None


def _router(context: zmq.Context) -> zmq.Socket:
    # libzmq numbers connections from a C `rand()` on that nobody seeds, and aborts the process (`ok`, socket_base.cpp)
    # when the next number is already the routing id that a peer has chosen: nobody may know which one is next.
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.ROUTER_MANDATORY, 1)  # a peer that has gone or is full is an error to see, not a silent drop
    socket.set(zmq.RCVHWM, UNREAD_MESSAGES)
    return socket


def _dealer(context: zmq.Context) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not there
    return socket


def _tune(socket: zmq.Socket, linger_milliseconds: int, max_message_bytes: int) -> None:
    """Sets what must be set before bind or connect."""
    socket.set(zmq.LINGER, linger_milliseconds)  # the default waits for ever on exit
    # The default lets a peer announce, and reserve, anything. No limit is below a header's, encrypted or not.
    socket.set(zmq.MAXMSGSIZE, max(max_message_bytes, SMALL_MESSAGE_BYTES) + ENCRYPTION_BYTES)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.BACKLOG, 1024)  # a fleet of actors connects at once
    socket.set(zmq.TCP_KEEPALIVE, 1)  # ends a connection on which nothing was under way, ...
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 4)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 2)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.set(zmq.TCP_MAXRT, LOST_PEER_MILLISECONDS)  # ... and this one on which something was
    socket.set(zmq.CONNECT_TIMEOUT, 5_000)
    socket.set(zmq.RECONNECT_IVL, 100)
    socket.set(zmq.RECONNECT_IVL_MAX, LONGEST_RECONNECT_MILLISECONDS)


def _bind(
    socket: zmq.Socket,
    address: str,
    link: str,
    monitor: ServerMonitor | None,
    max_message_bytes: int,
    linger_milliseconds: int = 200,
) -> zmq.Socket:
    _tune(socket, linger_milliseconds, max_message_bytes)
    try:
        secure(socket, link, address, is_server=True)
        if monitor is not None:
            monitor.attach(socket, link, address)
        if address.startswith("ipc://") and not address.startswith("ipc://@"):
            check_path_is_free(address.removeprefix("ipc://"))  # ZMQ takes it away from whoever serves there
        socket.bind(address)
    except (OSError, zmq.ZMQError, UsageError) as error:
        _close(socket, monitor)
        if isinstance(error, UsageError):
            raise
        raise BindError(
            f"addresses.{link}={address} cannot be served: {error.strerror or error};"
            " choose a free address of this machine"
        ) from None
    return socket


def _connect(
    socket: zmq.Socket,
    address: str,
    link: str,
    monitor: ClientMonitor | None,
    max_message_bytes: int,
    linger_milliseconds: int = 200,
) -> zmq.Socket:
    _tune(socket, linger_milliseconds, max_message_bytes)
    try:
        secure(socket, link, address, is_server=False)
        if monitor is not None:
            monitor.attach(socket, link, address)
        socket.connect(address)
    except BaseException as error:
        _close(socket, monitor)
        if isinstance(error, zmq.ZMQError):
            raise RunError(
                f"addresses.{link}={address} cannot be joined: {error.strerror}; give the address of its server"
            ) from None
        raise
    return socket


def _close(socket: zmq.Socket, monitor: Monitors | None) -> None:
    if monitor is not None:
        monitor.close()
    socket.close()


class WakeUp:
    """Lets one thread wake another that polls sockets."""

    def __init__(self, context: zmq.Context) -> None:
        self.socket = context.socket(zmq.PAIR)  # that the woken thread polls
        self._sender = context.socket(zmq.PAIR)
        address = f"inproc://wake-up-{id(self)}"
        self.socket.bind(address)
        self._sender.connect(address)

    def wake_up(self) -> None:
        """Wakes the other thread, now or when it polls next; does nothing once closed."""
        with contextlib.suppress(zmq.Again):  # so many are under way that one more changes nothing
            if not self._sender.closed:
                self._sender.send(b"", zmq.NOBLOCK)

    def clear(self) -> None:
        """Takes what has woken this thread."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.socket.recv(zmq.NOBLOCK)

    def close(self) -> None:
        """Closes both ends, once the other thread has ended."""
        for socket in (self._sender, self.socket):
            socket.close(linger=0)


MAX_SOCKET_PATH = 107  # bytes of a Unix socket's address


def _short_directory() -> tempfile.TemporaryDirectory[str]:
    """Makes a directory whose sockets have paths that the system can bind: in TMPDIR, or else in a shorter place."""
    usual = tempfile.gettempdir()
    room = MAX_SOCKET_PATH - len("/apex-jax-12345678/status-actor-1023")
    for parent in (usual, os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/dev/shm"):
        if parent and len(os.fsencode(parent)) <= room:
            with contextlib.suppress(OSError):  # full, read-only, or not there
                return tempfile.TemporaryDirectory(prefix="apex-jax-", dir=parent)
    raise RunError(
        f"TMPDIR={usual}: the sockets of a run need a folder that can be written, with a path of at most {room} bytes"
        f" (this one has {len(os.fsencode(usual))}); set another TMPDIR"
    )


class LocalLinks:
    """Addresses for the links of one machine: ipc in a directory of its own, short enough for a socket's path."""

    def __init__(self) -> None:
        """Makes the directory; only this user can enter it. RunError if no folder is short enough."""
        self._directory = _short_directory()
        self.experience, self.sampling, self.weights, self.status = (
            f"ipc://{os.path.join(self._directory.name, link)}"
            for link in ("experience", "sampling", "weights", "status")
        )

    def close(self) -> None:
        """Removes the directory."""
        self._directory.cleanup()
