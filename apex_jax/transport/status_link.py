"""The status link: JSON over HTTP/1.1, for people, supervisors and load balancers alike.

One thread serves any number of clients, each with a deadline and a small buffer: one that sends slowly, nothing or
garbage costs nobody else an answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from apex_jax.errors import RunError
from apex_jax.transport.addresses import check_path_is_free, resolve, split

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64  # the oldest makes room for the next
MAX_REQUEST_BYTES = 8192
MAX_REPLY_BYTES = 2**20
CONNECTION_SECONDS = 5.0  # from accept to close
REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,1024}) HTTP/1\.[01]\r\n")
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}

Report = Callable[[], tuple[bool, dict[str, Any]]]  # healthy, and what there is to say


class StatusError(RunError):
    """No status can be had, or none be served; the message names the address and says why."""


@dataclass
class _Connection:
    socket: socket.socket
    since_seconds: float
    request: bytearray = field(default_factory=bytearray)
    reply: memoryview | None = None
    is_answered: bool = False  # and waits for the client to close


class StatusServer:
    """Answers `GET /status` and `GET /` with what `report` returns: 200 healthy, 503 not."""

    def __init__(self, address: str, report: Report):
        """Binds (StatusError where that fails) and starts the thread. `report`: called there, quick."""
        self._report = report
        self._listener = _listen(address)
        self._path = split(address).path
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}  # by file descriptor, oldest first
        self._closing = False
        self._waker, self._wake = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and frees the address."""
        self._closing = True
        with contextlib.suppress(OSError):  # it has seen that already
            self._waker.send(b"\0")
        self._thread.join()
        self._waker.close()  # not by the thread, which may have ended before it was woken
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(timeout=1.0):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd in self._connections:
                    self._serve(self._connections[key.fd])
            now = time.monotonic()
            for connection in list(self._connections.values()):
                if now - connection.since_seconds > CONNECTION_SECONDS:
                    self._drop(connection)
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        for end in (self._listener, self._wake):
            end.close()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone again, or there is no file descriptor left: then not at full speed
            time.sleep(0.01)
            return
        client.setblocking(False)
        if len(self._connections) >= MAX_CONNECTIONS:
            self._drop(next(iter(self._connections.values())))
        self._connections[client.fileno()] = _Connection(client, time.monotonic())
        self._selector.register(client, selectors.EVENT_READ)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection.socket.fileno()]
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _serve(self, connection: _Connection) -> None:
        try:
            is_done = self._read(connection) if connection.reply is None else self._write(connection)
        except BlockingIOError:
            return
        except OSError:  # the client has gone
            is_done = True
        if is_done:
            self._drop(connection)

    def _read(self, connection: _Connection) -> bool:
        """Takes more of the request, and turns to writing at its end; returns whether the connection is of no use."""
        data = connection.socket.recv(4096)
        if connection.is_answered:  # a close with something unread would take the answer back
            return not data
        connection.request += data
        if b"\r\n\r\n" in connection.request:
            connection.reply = memoryview(self._reply_to(bytes(connection.request)))
        elif len(connection.request) > MAX_REQUEST_BYTES:
            connection.reply = memoryview(_reply(431, {"error": f"send at most {MAX_REQUEST_BYTES} bytes"}))
        elif not data:
            return True
        if connection.reply is not None:
            self._selector.modify(connection.socket, selectors.EVENT_WRITE)
        return False

    def _write(self, connection: _Connection) -> bool:
        assert connection.reply is not None
        connection.reply = connection.reply[connection.socket.send(connection.reply) :]
        if not connection.reply:
            connection.reply, connection.is_answered = None, True
            connection.socket.shutdown(socket.SHUT_WR)
            self._selector.modify(connection.socket, selectors.EVENT_READ)
        return False

    def _reply_to(self, request: bytes) -> bytes:
        line = REQUEST_LINE.match(request)
        if line is None:
            return _reply(400, {"error": "not an HTTP/1.1 request; send GET /status"})
        method, path = line[1], line[2].partition(b"?")[0]
        if path not in (b"/", b"/status"):
            return _reply(404, {"error": "there is only /status"})
        if method != b"GET":
            return _reply(405, {"error": "only GET is answered"})
        try:
            healthy, content = self._report()
            return _reply(200 if healthy else 503, content)
        except Exception:  # whatever is wrong with the report, the process that it is of lives on
            _log.exception("the status report failed")
            return _reply(500, {"error": "the report failed; see the log of the process"})


def fetch(address: str, seconds: float) -> tuple[bool, dict[str, Any]]:
    """Returns whether the process behind a status address is healthy, and its report.

    Takes at most `seconds`. UsageError for what is no address, StatusError where there is no answer or no sound one.
    """
    until = time.monotonic() + seconds
    try:
        with _connected(address, seconds) as client:
            client.sendall(b"GET /status HTTP/1.1\r\nHost: status\r\nConnection: close\r\n\r\n")
            reply = bytearray()
            while len(reply) <= MAX_REPLY_BYTES:
                client.settimeout(max(0.01, until - time.monotonic()))
                if not (data := client.recv(65536)):
                    break
                reply += data
    except TimeoutError:
        raise StatusError(
            f"{address} has not answered within {seconds:g} s: the process is stopped, or stuck"
        ) from None
    except OSError as error:
        raise StatusError(f"{address} does not answer: {error.strerror or error}; is the process running?") from None
    return _parsed(address, bytes(reply))


def _connected(address: str, seconds: float) -> socket.socket:
    """Returns a connection to the first place behind the address that takes one. OSError."""
    until = time.monotonic() + seconds
    error = OSError(0, "it has no address")
    for family, place in resolve(split(address), seconds):
        client = socket.socket(family, socket.SOCK_STREAM)
        try:
            client.settimeout(max(0.01, until - time.monotonic()))
            client.connect(place)
            return client
        except OSError as refusal:  # localhost is ::1 and 127.0.0.1, and a server may be at the second alone
            client.close()
            error = refusal
    raise error


def _parsed(address: str, reply: bytes) -> tuple[bool, dict[str, Any]]:
    head, _, body = reply.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.1 ([0-9]{3}) ", head)
    try:
        content = json.loads(body) if status else None
    except (ValueError, RecursionError):
        content = None
    if status is None or status[1] not in (b"200", b"503") or not isinstance(content, dict) or "role" not in content:
        raise StatusError(f"{address} answers, but not as an apex_jax process: is the address right?")
    return status[1] == b"200", content


def _reply(status: int, content: dict[str, Any]) -> bytes:
    body = json.dumps(content, indent=2).encode() + b"\n"
    allow = "Allow: GET\r\n" if status == 405 else ""
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n{allow}Connection: close\r\n\r\n"
    )
    return head.encode() + body


def _listen(address: str) -> socket.socket:
    parts = split(address)
    try:
        if parts.path:
            return _listen_at_path(parts.path)
        family, place = (socket.AF_INET, ("", parts.port)) if parts.host == "*" else resolve(parts, 3.0)[0]
        listener = socket.create_server(place[:2], family=family, backlog=MAX_CONNECTIONS)
        listener.setblocking(False)
        return listener
    except (OSError, RunError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StatusError(
            f"addresses.status={address} cannot be served: {reason}; choose a free address of this machine"
        ) from None


def _listen_at_path(path: str) -> socket.socket:
    """Takes over the socket of a process that was killed, never that of one that lives, nor a file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        check_path_is_free(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
