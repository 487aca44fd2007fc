"""Handles connections that fail before the first message: refused keys and failed handshakes.

A ZMQ socket does not report failed handshakes: a client with a wrong key waits silently, and after some errors does not
even reconnect. Its monitor does report them; this module turns them into log lines, counts and new attempts.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import struct
import time
from collections import Counter
from collections.abc import Iterator

import zmq

from apex_jax.host.errors import RunError
from apex_jax.transport.security import LINKS

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
