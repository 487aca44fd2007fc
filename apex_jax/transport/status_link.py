"""The status link: HTTP/1.1 for users, supervisors, load balancers and Prometheus.

Any number of clients may connect. Each connection has a deadline and a limit on its request size, and the oldest is
closed when there are too many, so that clients which send slowly, nothing or garbage do not block others.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer, TCPServer, ThreadingMixIn
from typing import Any

from apex_jax.host.errors import RunError
from apex_jax.transport.addresses import check_path_is_free, resolve, split

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8192
MAX_REPLY_BYTES = 2**20
MAX_DEPTH = 20  # of a report; deeper ones would exceed the recursion limit of whoever shows them
MAX_DRAINED_BYTES = 2**16  # read and discarded after an answer
CONNECTION_SECONDS = 5.0  # lifetime of a connection

Report = Callable[[], tuple[bool, dict[str, Any]]]  # (healthy, content of the status)


class StatusError(RunError):
    """A status cannot be fetched or served; the message has the address and the reason."""


class StatusServer(ThreadingMixIn, TCPServer):
    """Answers `GET /status` and `/` with a report as JSON (200 if healthy, else 503), `GET /metrics` with gauges."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, report: Report):
        """Binds (or raises StatusError) and starts the thread. `report` is called on other threads and must be fast."""
        BaseServer.__init__(self, address, _Handler)
        self.socket = _listen(address)
        self.report = report
        self._path = split(address).path
        self._connections: dict[socket.socket, None] = {}  # oldest first
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and frees the address."""
        self.shutdown()
        self._thread.join()
        self.server_close()
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts a connection. Raises OSError, after a pause to avoid a busy loop when file descriptors run out."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.01)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection, after closing the oldest ones if there are too many."""
        with self._changed:
            while len(self._connections) >= MAX_CONNECTIONS:
                with contextlib.suppress(OSError):
                    next(iter(self._connections)).shutdown(socket.SHUT_RDWR)  # ends its thread
                self._changed.wait(0.1)
            self._connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        super().shutdown_request(request)
        with self._changed:
            self._connections.pop(request, None)
            self._changed.notify()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs exceptions other than OSError, which a disconnected client causes."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("a request to the status page failed")


class _Handler(BaseHTTPRequestHandler):
    """Serves one connection, which has one request."""

    server: StatusServer
    protocol_version = default_request_version = request_version = "HTTP/1.1"
    requestline = ""

    def setup(self) -> None:
        self._until = time.monotonic() + CONNECTION_SECONDS
        super().setup()
        self.rfile.close()
        self._head = self._read_head()
        self.rfile = io.BufferedReader(io.BytesIO(self._head))  # type: ignore[arg-type]

    def handle(self) -> None:
        if len(self._head) > MAX_REQUEST_BYTES:
            self.send_error(431, f"send at most {MAX_REQUEST_BYTES} bytes")
        else:
            self.handle_one_request()

    def finish(self) -> None:
        super().finish()
        drained_bytes = 0
        with contextlib.suppress(OSError):  # closing with unread data would discard the answer
            self.connection.shutdown(socket.SHUT_WR)
            while drained_bytes < MAX_DRAINED_BYTES and (data := self._receive()):
                drained_bytes += len(data)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path not in ("/", "/status", "/metrics"):
            self.send_error(404, "there are only /status and /metrics")
            return
        try:
            healthy, content = self.server.report()
            body = gauges(content) if path == "/metrics" else json.dumps(content, indent=2).encode() + b"\n"
        except Exception:  # a failing report must not end its process
            _log.exception("the status report failed")
            self.send_error(500, "the report failed; see the log of the process")
            return
        if path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", body)
        else:
            self._answer(200 if healthy else 503, "application/json", body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers with an error as JSON, since the standard library's error page would quote the request."""
        if code == 501:  # a method without a `do_...`
            code, message = 405, "only GET is answered"
        error = {"error": message or self.responses[code][0]}
        self._answer(code, "application/json", json.dumps(error).encode() + b"\n")

    def version_string(self) -> str:
        return "apex_jax"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": content_type, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff", "Connection": "close"} | (
            {"Allow": "GET"} if status == 405 else {}
        )
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.connection.settimeout(max(0.01, self._until - time.monotonic()))
        self.wfile.write(body)

    def _read_head(self) -> bytes:
        """Returns the request's head, over MAX_REQUEST_BYTES if it is too large; b"" if it is incomplete."""
        head = b""
        try:
            while len(head) <= MAX_REQUEST_BYTES and b"\r\n\r\n" not in head:
                if not (data := self._receive()):
                    return b""
                head += data
        except OSError:  # disconnected, or deadline exceeded
            return b""
        return head

    def _receive(self) -> bytes:
        """Returns the next bytes of the client, b"" at the end. Raises OSError after the connection's deadline."""
        if (left_seconds := self._until - time.monotonic()) <= 0:
            raise TimeoutError
        self.connection.settimeout(left_seconds)
        return self.connection.recv(4096)


def gauges(content: Mapping[str, Any]) -> bytes:
    """Returns the numbers of a report in Prometheus's text format, labelled with the role and name of the process.

    `{"metrics": {"learner/updates": 5}}` becomes `apex_jax_learner_updates`; lists and strings are omitted.
    """
    from prometheus_client import CollectorRegistry, Gauge, generate_latest  # imported here: takes 0.1 s

    registry = CollectorRegistry()
    labels = {"role": str(content.get("role")), "name": str(content.get("name"))}
    numbers = dict(_numbers("", {**content, **content.get("metrics", {}), "metrics": None}))
    for name, number in numbers.items():
        Gauge(f"apex_jax_{name}", "see docs/metrics.md", list(labels), registry=registry).labels(**labels).set(number)
    return generate_latest(registry)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yields (name, number) of each number in a report; nested names are joined by "_"."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _numbers(re.sub(r"\W", "_", f"{name}_{key}" if name else key), member)
    elif isinstance(value, bool | int | float):
        yield name, float(value)


def fetch(address: str, seconds: float) -> tuple[bool, dict[str, Any]]:
    """Returns whether the process at a status address is healthy, and its report, within `seconds`.

    Raises UsageError for a malformed address, StatusError for a missing or invalid answer.
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
    """Returns a connection to the first endpoint of the address that accepts one. Raises OSError."""
    until = time.monotonic() + seconds
    error = OSError(0, "it has no address")
    for family, place in resolve(split(address), seconds):
        client = socket.socket(family, socket.SOCK_STREAM)
        try:
            client.settimeout(max(0.01, until - time.monotonic()))
            client.connect(place)
            return client
        except OSError as refusal:  # localhost is ::1 and 127.0.0.1; a server may use only the second
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
    if (
        status is None
        or status[1] not in (b"200", b"503")
        or not isinstance(content, dict)
        or "role" not in content
        or _is_deep(content)
    ):
        raise StatusError(f"{address} answers, but not as an apex_jax process: is the address right?")
    return status[1] == b"200", content


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
    """Returns a listener; replaces the socket of a dead process, but neither a live server's socket nor a file."""
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


def _is_deep(content: Any) -> bool:
    """Returns whether JSON content is nested more than MAX_DEPTH deep."""
    level = [content]
    for _ in range(MAX_DEPTH):
        members = [list(value.values()) if isinstance(value, dict) else value for value in level]
        level = [member for values in members if isinstance(values, list) for member in values]
    return bool(level)
