"""The three links as ZMQ sockets, with the options that ZMQ's defaults get wrong for them.

experience  actors (DEALER) <-> replay server (ROUTER): segments and statistics up, acknowledgements down
sampling    learner (DEALER) <-> replay server (ROUTER): credit, priorities up; segments, index batches down, in order
weights     learner (XPUB) -> actors and evaluator (SUB): parameters; a new subscriber is noticed, and gets the newest

No socket is shared between threads, and nothing here waits: `send` and `receive` return at once.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from typing import Any

import zmq

from apex_jax.errors import RunError
from apex_jax.transport import wire
from apex_jax.types import MAX_WEIGHTS_BYTES

HEARTBEAT_MILLISECONDS = 2_000  # a silent tcp peer (cable, NAT, frozen host) is given up after three of these


class BindError(RunError):
    """An address cannot be served from here; the message names it and says what to do."""


def serve_experience(context: zmq.Context, address: str) -> zmq.Socket:
    """Binds the replay server's end of the experience link."""
    return _bind(_router(context), address, "addresses.experience")


def connect_experience(context: zmq.Context, address: str) -> zmq.Socket:
    """Connects an actor to the replay server; ZMQ reconnects by itself for as long as the socket lives."""
    return _connect(_dealer(context), address)


def serve_sampling(context: zmq.Context, address: str) -> zmq.Socket:
    """Binds the replay server's end of the sampling link."""
    return _bind(_router(context), address, "addresses.sampling")


def connect_sampling(context: zmq.Context, address: str) -> zmq.Socket:
    """Connects the learner to the replay server."""
    return _connect(_dealer(context), address)


def serve_weights(context: zmq.Context, address: str) -> zmq.Socket:
    """Binds the learner's end of the weights link; receiving from it yields subscriptions, see `is_subscription`."""
    socket = context.socket(zmq.XPUB)
    socket.set(zmq.XPUB_VERBOSE, 1)  # also the second subscriber is told of, so that it need not wait for an update
    socket.set(zmq.SNDHWM, 2)
    return _bind(socket, address, "addresses.weights", linger_milliseconds=1_000)


def connect_weights(context: zmq.Context, address: str) -> zmq.Socket:
    """Connects a subscriber of weights."""
    socket = context.socket(zmq.SUB)
    socket.set(zmq.RCVHWM, 2)
    socket.subscribe(b"")
    return _connect(socket, address, max_message_bytes=MAX_WEIGHTS_BYTES)


def is_subscription(frames: list[bytes]) -> bool:
    """Tells whether what an XPUB socket received says that somebody new listens."""
    return len(frames) == 1 and frames[0] == b"\x01"


def send(socket: zmq.Socket, message: Any, identity: bytes | None = None) -> bool:
    """Sends a message if the peer can take it now (to `identity`, from a ROUTER); returns whether it could."""
    frames = wire.encode(message)
    try:
        socket.send_multipart(frames if identity is None else [identity, *frames], zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):  # the peer behind this identity has gone
            return False
        raise
    return True


def receive(socket: zmq.Socket, expected: tuple[type, ...], dropped: Counter[str]) -> Any | None:
    """Returns the next message that is waiting, or None.

    What is malformed, or of a kind not in `expected`, is skipped and counted in `dropped` by reason.
    """
    while (received := _receive(socket, expected, dropped, has_identity=False)) is not None:
        if received[1] is not None:
            return received[1]
    return None


def receive_from(socket: zmq.Socket, expected: tuple[type, ...], dropped: Counter[str]) -> tuple[bytes, Any] | None:
    """Returns (identity, message) of the next message waiting on a ROUTER, or None; otherwise like `receive`."""
    while (received := _receive(socket, expected, dropped, has_identity=True)) is not None:
        if received[1] is not None:
            return received
    return None


def _receive(
    socket: zmq.Socket, expected: tuple[type, ...], dropped: Counter[str], has_identity: bool
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
        return identity, None


def _router(context: zmq.Context) -> zmq.Socket:
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.ROUTER_MANDATORY, 1)  # a peer that has gone or is full is an error to see, not a silent drop
    return socket


def _dealer(context: zmq.Context) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not there
    return socket


def _tune(socket: zmq.Socket, linger_milliseconds: int, max_message_bytes: int) -> None:
    """Sets what must be set before bind or connect."""
    socket.set(zmq.LINGER, linger_milliseconds)  # the default waits for ever on exit
    socket.set(zmq.MAXMSGSIZE, max_message_bytes)  # the default lets a peer announce, and reserve, anything
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.BACKLOG, 1024)  # a fleet of actors connects at once
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MILLISECONDS)
    socket.set(zmq.HEARTBEAT_TTL, 3 * HEARTBEAT_MILLISECONDS)
    socket.set(zmq.CONNECT_TIMEOUT, 5_000)
    socket.set(zmq.RECONNECT_IVL, 100)
    socket.set(zmq.RECONNECT_IVL_MAX, 5_000)


def _bind(socket: zmq.Socket, address: str, key: str, linger_milliseconds: int = 200) -> zmq.Socket:
    _tune(socket, linger_milliseconds, max_message_bytes=2**25)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise BindError(
            f"{key}={address} cannot be served: {error.strerror or error}; choose a free address of this machine"
        ) from None
    return socket


def _connect(socket: zmq.Socket, address: str, max_message_bytes: int = 2**28) -> zmq.Socket:
    _tune(socket, linger_milliseconds=200, max_message_bytes=max_message_bytes)
    socket.connect(address)
    return socket


class LocalLinks:
    """Addresses for the links of one machine: ipc in a directory of its own, short enough for a socket's path."""

    def __init__(self) -> None:
        """Makes the directory; only this user can enter it."""
        self._directory = tempfile.TemporaryDirectory(prefix="apex-jax-")
        self.experience, self.sampling, self.weights = (
            f"ipc://{os.path.join(self._directory.name, link)}" for link in ("experience", "sampling", "weights")
        )

    def close(self) -> None:
        """Removes the directory."""
        self._directory.cleanup()
