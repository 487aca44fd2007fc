"""HTTP/1.1 by Python's standard library, for the status of a process and the page of a run."""

from __future__ import annotations

import http.client
import io
import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer, TCPServer, ThreadingMixIn
from typing import Any, BinaryIO, NamedTuple

from apex_jax.host.errors import RunError
from apex_jax.transport.addresses import is_loopback, resolve, split

_log = logging.getLogger(__name__)

BACKLOG = 64  # connections that wait to be accepted
PIECE_BYTES = 2**16  # of a body, sent at once
TIMEOUT_SECONDS = 5.0  # of a client that neither sends its request nor takes the next piece of the answer
THIS_MACHINE = re.compile(r"(127(\.[0-9]{1,3}){3}|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    content_type: str
    body: bytes | BinaryIO  # a file is read in pieces while it is sent, and then closed


class HttpServer(ThreadingMixIn, TCPServer):
    """Answers GET and HEAD, each connection on a thread of its own."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, answer: Callable[[str], Answer | None], name: str, is_loopback: bool):
        """Starts the thread of this name, which accepts connections on `listener`, a socket that does not block.

        `answer`: receives the path of a request without its query; None = there is no such path. It is called on the
        connection's thread; an exception becomes code 500.
        `is_loopback`: the address is a loopback one. Then a request for the host name of another machine gets code
        403: a browser sends it for a web page whose name resolves to this machine (DNS rebinding). Browsers always send
        a host name, so a request without one is answered. Other addresses accept any host name.
        """
        BaseServer.__init__(self, listener.getsockname(), _Handler)
        self.socket = listener
        self.answer, self.is_loopback = answer, is_loopback
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and frees the address."""
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs exceptions other than OSError, which a disconnected client causes."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("a request failed")


class _Handler(BaseHTTPRequestHandler):
    """Serves one connection, which has one request."""

    server: HttpServer
    protocol_version = default_request_version = request_version = "HTTP/1.1"
    timeout = TIMEOUT_SECONDS
    command = ""

    def do_GET(self) -> None:
        if self.server.is_loopback and not THIS_MACHINE.fullmatch(self.headers.get("Host", "localhost")):
            self.send_error(403, "the host must be 127.0.0.1 or localhost")
            return
        try:
            answer = self.server.answer(self.path.partition("?")[0])
        except Exception:  # a failing answer must not end its process
            _log.exception("the answer to a request failed")
            self.send_error(500, "the answer failed; see the log of the process")
            return
        if answer is None:
            self.send_error(404)
        else:
            self._send(answer)

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers with an error as JSON, since the standard library's error page would quote the request."""
        if code == 501:  # a method without a `do_...`
            code, message = 405, "only GET and HEAD are answered"
        self._send(error_answer(code, message or self.responses[code][0]))

    def version_string(self) -> str:
        return "apex_jax"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _send(self, answer: Answer) -> None:
        with io.BytesIO(answer.body) if isinstance(answer.body, bytes) else answer.body as body:
            self._send_head(answer, body.seek(0, io.SEEK_END))
            body.seek(0)
            while self.command != "HEAD" and (piece := body.read(PIECE_BYTES)):
                self.wfile.write(piece)

    def _send_head(self, answer: Answer, body_bytes: int) -> None:
        self.send_response(answer.status)
        headers = {"Content-Type": answer.content_type, "Content-Length": str(body_bytes), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff", "Connection": "close"}
        headers |= {"Allow": "GET, HEAD"} if answer.status == 405 else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def error_answer(status: int, message: str) -> Answer:
    """Returns an error as JSON."""
    return Answer(status, "application/json", json.dumps({"error": message}).encode() + b"\n")


# The status link: the report of a process, for users, supervisors, load balancers and Prometheus --------------------


MAX_REPLY_BYTES = 2**20

Report = Callable[[], tuple[bool, dict[str, Any]]]  # (healthy, content of the status)


class StatusError(RunError):
    """A status cannot be fetched or served; the message has the address and the reason."""


class StatusServer(HttpServer):
    """Answers `GET /status` and `/` with a report as JSON (200 if healthy, else 503), `GET /metrics` with gauges."""

    def __init__(self, address: str, report: Report):
        """Binds (or raises StatusError) and starts the thread. `report` is called on other threads and must be fast."""
        self._report = report
        super().__init__(_listen(address), self._status, "status", is_loopback(address))

    def _status(self, path: str) -> Answer:
        if path not in ("/", "/status", "/metrics"):
            return error_answer(404, "there are only /status and /metrics")
        healthy, content = self._report()
        if path == "/metrics":
            return Answer(200, "text/plain; version=0.0.4; charset=utf-8", gauges(content))
        return Answer(200 if healthy else 503, "application/json", json.dumps(content, indent=2).encode() + b"\n")


def fetch(address: str, seconds: float) -> tuple[bool, dict[str, Any]]:
    """Returns whether the process at a status address is healthy, and its report, within `seconds`.

    Raises UsageError for a malformed address, StatusError for a missing or invalid answer.
    """
    connection = http.client.HTTPConnection("localhost")
    try:
        with _connected(address, seconds) as connection.sock:
            connection.request("GET", "/status")
            with connection.getresponse() as response:
                return _parsed(address, response.status, response.read(MAX_REPLY_BYTES))
    except TimeoutError:
        raise StatusError(
            f"{address} has not answered within {seconds:g} s: the process is stopped, or stuck"
        ) from None
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name with an empty or too long part
        reason = getattr(error, "strerror", None) or error
        raise StatusError(f"{address} does not answer: {reason}; is the process running?") from None
    except http.client.HTTPException:
        return _parsed(address, 0, b"")


def _connected(address: str, seconds: float) -> socket.socket:
    """Returns a connection to the address. Raises OSError."""
    parts = split(address)
    if not parts.path:
        return socket.create_connection((parts.host, parts.port), seconds)
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(seconds)
    try:
        client.connect(parts.path)
    except OSError:
        client.close()
        raise
    return client


def _parsed(address: str, status: int, body: bytes) -> tuple[bool, dict[str, Any]]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if status not in (200, 503) or not isinstance(content, dict) or "role" not in content:
        raise StatusError(f"{address} answers, but not as an apex_jax process: is the address right?")
    return status == 200, content


def _listen(address: str) -> socket.socket:
    parts = split(address)
    try:
        family, place = (socket.AF_INET, ("", parts.port)) if parts.host == "*" else resolve(parts)[0]
        listener = socket.create_server(place[:2], family=family, backlog=BACKLOG)
        listener.setblocking(False)
        return listener
    except (OSError, RunError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StatusError(
            f"addresses.status={address} cannot be served: {reason}; choose a free address of this machine"
        ) from None


# The status of a process in Prometheus's text format -----------------------------------------------------------------


def gauges(content: Mapping[str, Any]) -> bytes:
    """Returns the numbers of a report in Prometheus's text format, labelled with the role and name of the process.

    `{"metrics": {"learner/updates": 5}}` becomes `apex_jax_learner_updates`; lists and strings are omitted. The
    `reports` that a local run has of its processes are labelled with those, as if each had been fetched by itself.
    """
    from prometheus_client import CollectorRegistry, Gauge, generate_latest  # imported here: takes 0.1 s

    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    for report in ({**content, "reports": None}, *content.get("reports", {}).values()):
        labels = {"role": str(report.get("role")), "name": str(report.get("name"))}
        for name, number in _numbers("", {**report, **report.get("metrics", {}), "metrics": None}):
            if name not in gauges:
                gauges[name] = Gauge(f"apex_jax_{name}", "of a process of Ape-X", list(labels), registry=registry)
            gauges[name].labels(**labels).set(number)
    return generate_latest(registry)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yields (name, number) of each number in a report; nested names are joined by "_"."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _numbers(re.sub(r"\W", "_", f"{name}_{key}" if name else key), member)
    elif isinstance(value, bool | int | float):
        yield name, float(value)
