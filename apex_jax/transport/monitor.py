"""Handles connections that fail before the first message: refused keys and failed handshakes.

A ZMQ socket does not report failed handshakes: a client with a wrong key waits silently, and after some errors does not
even reconnect. Its monitor does report them; this module turns them into log lines, counts and new attempts.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import socket as tcp
import struct
import time
from collections import Counter
from collections.abc import Iterator

import zmq

from apex_jax.host.errors import RunError
from apex_jax.transport.security import LINKS, NO_KEYS, LinkContext, Security

_log = logging.getLogger(__name__)

GIVE_UP_SECONDS = 10.0  # handshakes that fail for this long, and that only a user can fix, end in RunError
GAP_SECONDS = 5.0  # without a failure, after which the next one counts as a new problem
RECONNECT_SECONDS = 1.0  # after the loss of a connection that ZMQ does not restore
PROBE_SECONDS = 1.0  # timeout for a server's greeting
REPORT_SECONDS = 60.0  # between two log lines of a server
GREETING = b"\xff" + bytes(8) + b"\x7f\x03"  # start of a ZMTP 3 greeting: enough for a server to send all of its own
GREETING_BYTES = 64

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

    @property
    def _security(self) -> Security:
        assert self._socket is not None
        context = self._socket.context
        return context.security if isinstance(context, LinkContext) else NO_KEYS


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
            files = " or ".join(f"{role}.public" for role in LINKS[self._link].clients)
            how = "in plain text, for another server key" if self._security.has_keys else "encrypted"
            how = f"{how} or in another protocol"
            reasons = {"refused_key": f"whose key is not in {files}", "failed_handshake": how}
            counts = ", ".join(
                f"{self._unlogged[reason]} {text}" for reason, text in reasons.items() if self._unlogged[reason]
            )
            _log.warning("connections refused on the %s link at %s: %s", self._link, self._address, counts)
            self._unlogged.clear()


class ClientMonitor(Monitor):
    """Logs why a server cannot be joined, and reconnects; raises RunError for causes that only a user can fix.

    An unreachable server is not an error: the client retries indefinitely.
    """

    _events = _EVENTS_OF_A_CLIENT

    def __init__(self) -> None:
        super().__init__()
        self.is_connected = False  # connected, with a successful handshake
        self._given_up_seconds: float | None = None  # when the connection was lost; None while ZMQ reconnects by itself
        self._is_shaking_hands = False
        self._cause = ""  # logged cause of the current failures
        self._first_failure = self._last_failure = self._last_probe = -GAP_SECONDS
        self._mechanism: str | None = None  # security mechanism in the server's greeting

    def check(self) -> None:
        """Processes new events, and reconnects if ZMQ does not.

        Raises RunError after `GIVE_UP_SECONDS` of handshakes that can never succeed.
        """
        now = time.monotonic()
        for event, value in self._new_events():
            self._on_event(event, value, now)
        if self._given_up_seconds is not None and now - self._given_up_seconds >= RECONNECT_SECONDS:
            self.reconnect()  # ZMQ itself does so after every network error, but not after an oversized message

    def _on_event(self, event: int, value: int, now: float) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_connected = True
            if self._cause:
                _log.info("joined the %s at %s", self._server, self._address)
            self._cause, self._first_failure, self._last_failure = "", -GAP_SECONDS, -GAP_SECONDS
        elif event in _FAILURES:
            self._on_failure(event, value, now)
        elif event == zmq.EVENT_DISCONNECTED:
            if self._is_shaking_hands:  # by a peer that sent no ZMTP greeting
                self._on_failure(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0, now)
            self.is_connected, self._given_up_seconds = False, now
        else:  # connected, or ZMQ reconnects by itself
            self._given_up_seconds = None
        self._is_shaking_hands = event == zmq.EVENT_CONNECTED

    def _on_failure(self, event: int, value: int, now: float) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value in (errno.EAGAIN, errno.ETIMEDOUT):
            return  # the host is silent; it did not refuse
        cause = self._cause_of(event, now)
        if not cause:
            return
        if now - self._last_failure > GAP_SECONDS:
            self._first_failure = now
        self._last_failure = now
        if cause != self._cause and now > self._first_failure:  # a server that is being replaced fails once
            self._cause = cause
            _log.warning("%s", cause)
        if now - self._first_failure >= GIVE_UP_SECONDS:
            raise RunError(f"{cause} (tried for {now - self._first_failure:.0f} s)")

    def _cause_of(self, event: int, now: float) -> str:
        """Returns why a handshake failed and how to fix it; empty if the cause is unknown, or may pass by itself."""
        security, server, address = self._security, self._server, self._address
        me = security.role or "process"
        setting = f"set addresses.{self._link} as the {server} has it"
        or_address = f"; if {address} serves another link, {setting}"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"the {server} at {address} refused the key of this {me}: put its public key into {me}.public there,"
                f" or start it with the secret that belongs to that file{or_address}"
            )
        if now - self._last_probe > GIVE_UP_SECONDS / 4:
            self._last_probe, self._mechanism = now, mechanism_at(address)
        file = f"{LINKS[self._link].server}.public"
        causes = {
            ("CURVE", True): (
                f"the {server} at {address} does not have the key in {file} here: copy {file} from there{or_address}"
            ),
            ("CURVE", False): f"the {server} at {address} takes encrypted connections only: set security.keys=DIR here",
            ("NULL", True): f"the {server} at {address} has no keys, this {me} has: set security.keys=DIR there too",
            ("NULL", False): f"{address} serves another link: {setting}",
        }
        return causes.get((self._mechanism or "", security.has_keys), "")

    def reconnect(self) -> None:
        """Replaces the connection by a new one."""
        assert self._socket is not None
        self._given_up_seconds, self.is_connected = None, False
        with contextlib.suppress(zmq.ZMQError):  # already disconnected
            self._socket.disconnect(self._address)
        self._socket.connect(self._address)

    @property
    def _server(self) -> str:
        server = LINKS[self._link].server
        return _NAMES.get(server, server)


def mechanism_at(address: str) -> str | None:
    """Returns the security mechanism in a tcp server's greeting, "CURVE" or "NULL"; None without a greeting."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    greeting, until = b"", time.monotonic() + PROBE_SECONDS
    try:
        with tcp.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS) as connection:
            connection.sendall(GREETING)
            while len(greeting) < GREETING_BYTES:
                connection.settimeout(max(0.001, until - time.monotonic()))
                if not (received := connection.recv(GREETING_BYTES - len(greeting))):
                    return None
                greeting += received
    except (OSError, ValueError):
        return None
    return greeting[12:32].rstrip(b"\0").decode(errors="replace") if greeting[0] == 0xFF else None
