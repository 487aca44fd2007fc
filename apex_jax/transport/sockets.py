"""The three links as ZMQ sockets, with the options that ZMQ's defaults get wrong for them.

experience  actors (DEALER) <-> replay server (ROUTER): segments and statistics up, acknowledgements down
sampling    learner (DEALER) <-> replay server (ROUTER): credit, priorities up; segments, index batches down, in order
weights     learner (XPUB) -> actors and evaluator (SUB): parameters; a new subscriber is noticed, and gets the newest

No socket is shared between threads, and nothing here waits: `send` and `receive` return at once. Over tcp a link is
encrypted as its context says, see `apex_jax.transport.security`; a monitor, where one is given, tells who was refused.
No link has ZMQ's heartbeats: libzmq 4.3.5 aborts the process (`!_io_error`) where one is due, or left to be read, on a
connection that broke behind a full queue. The messages of each link have signs of life instead.
"""

from __future__ import annotations

import contextlib
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
from apex_jax.transport.messages import MAX_ARRAY_SIZE
from apex_jax.transport.monitor import ClientMonitor, Monitors, ServerMonitor
from apex_jax.transport.security import secure
from apex_jax.types import MAX_SEGMENT_BYTES, MAX_WEIGHTS_BYTES

MESSAGES_AT_ONCE = 256  # read before all else gets its turn: another link, or what is to be sent
READING_TURN_SECONDS = 0.02  # after which no further message is read: some take thousands of times as long as others
MALFORMED_AT_ONCE = 256  # skipped before the caller gets its turn: a flood of garbage must not take all of it
LOST_PEER_MILLISECONDS = 10_000  # a host that answers no packet (cable, power) is given up about then
HANDSHAKE_MILLISECONDS = 10_000  # a connection that has not become one of ours by then is closed
SMALL_MESSAGE_BYTES = wire.MAX_HEADER_BYTES  # headers, acknowledgements, places on the ladder, subscriptions
ENCRYPTION_BYTES = 64  # CURVE makes a frame 33 bytes longer
# From one connection, that a server has yet to read: more than an actor has credit for by default, as a connection
# whose queue is full is not read. ZMQ would take 1,000 of a stranger.
UNREAD_MESSAGES = 128


class BindError(RunError):
    """An address cannot be served from here; the message names it and says what to do."""


def serve_experience(
    context: zmq.Context, address: str, monitor: ServerMonitor | None = None, max_message_bytes: int = MAX_SEGMENT_BYTES
) -> zmq.Socket:
    """Binds the replay server's end of the experience link. `max_message_bytes`: of a segment of this run."""
    return _bind(_router(context), address, "experience", monitor, max_message_bytes)


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
    """Binds the learner's end of the weights link; receiving from it yields subscriptions, see `is_subscription`."""
    socket = context.socket(zmq.XPUB)
    socket.set(zmq.XPUB_VERBOSER, 1)  # each subscriber is told of, so that none waits for an update, and each that goes
    socket.set(zmq.SNDHWM, 2)
    return _bind(socket, address, "weights", monitor, SMALL_MESSAGE_BYTES, linger_milliseconds=1_000)


def connect_weights(
    context: zmq.Context, address: str, monitor: ClientMonitor | None = None, max_message_bytes: int = MAX_WEIGHTS_BYTES
) -> zmq.Socket:
    """Connects a subscriber of weights. `max_message_bytes`: of the parameters of this run's network."""
    socket = context.socket(zmq.SUB)
    socket.set(zmq.RCVHWM, 2)
    socket.subscribe(b"")
    return _connect(socket, address, "weights", monitor, max_message_bytes)


def is_subscription(frames: list[bytes]) -> bool:
    """Tells whether what an XPUB socket received says that somebody new listens."""
    return len(frames) == 1 and frames[0] == b"\x01"


def is_end_of_subscription(frames: list[bytes]) -> bool:
    """Tells whether what an XPUB socket received says that somebody listens no more, or has gone."""
    return len(frames) == 1 and frames[0] == b"\x00"


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


def receive(socket: zmq.Socket, expected: tuple[type, ...], dropped: Counter[str]) -> Any | None:
    """Returns the next message that is waiting, or None, also where nothing but MALFORMED_AT_ONCE others was found.

    What is malformed, or of a kind not in `expected`, is skipped and counted in `dropped` by reason.
    """
    received = _next_sound(socket, expected, dropped, has_identity=False)
    return None if received is None else received[1]


def receive_some(
    socket: zmq.Socket,
    expected: tuple[type, ...],
    dropped: Counter[str],
    on_error: Callable[[wire.WireError], None] | None = None,
) -> Iterator[Any]:
    """Yields the messages that are waiting, at most MESSAGES_AT_ONCE: more may come for ever; else like `receive`.

    `on_error`: is told what is wrong with each that is skipped.
    """
    for _ in range(MESSAGES_AT_ONCE):
        received = _next_sound(socket, expected, dropped, has_identity=False, on_error=on_error)
        if received is None:
            return
        yield received[1]


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
    """Returns (identity, message) of the next message waiting on a ROUTER, or None; otherwise like `receive`."""
    return _next_sound(socket, expected, dropped, has_identity=True)


def _next_sound(
    socket: zmq.Socket,
    expected: tuple[type, ...],
    dropped: Counter[str],
    has_identity: bool,
    on_error: Callable[[wire.WireError], None] | None = None,
) -> tuple[bytes, Any] | None:
    for _ in range(MALFORMED_AT_ONCE):
        received = _receive(socket, expected, dropped, has_identity, on_error)
        if received is None or received[1] is not None:
            return received
    return None


def _receive(
    socket: zmq.Socket,
    expected: tuple[type, ...],
    dropped: Counter[str],
    has_identity: bool,
    on_error: Callable[[wire.WireError], None] | None,
) -> tuple[bytes, Any | None] | None:
    try:
        frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    identity = frames.pop(0).bytes if has_identity else b""
    try:
        return identity, wire.decode(frames, expected)
    except wire.WireError as error:
        dropped[error.reason] += 1
        if on_error is not None:
            on_error(error)
        if has_identity and (refusal := wire.encode_refusal(error)) is not None:
            _send_frames(socket, [identity, *refusal])  # without it that peer would wait for ever
        return identity, None


def _router(context: zmq.Context) -> zmq.Socket:
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
    socket.set(zmq.RECONNECT_IVL_MAX, 5_000)


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
