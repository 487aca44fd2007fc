"""HTTP/1.1 by Python's standard library, for what a process shows about itself: its status, and a run's page.

Any number of clients may connect. Each connection has a deadline and a limit on its request size, and the oldest is
closed when there are too many, so that clients which send slowly, nothing or garbage do not block others.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer, TCPServer, ThreadingMixIn
from typing import Any, BinaryIO, NamedTuple

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8192
MAX_DRAINED_BYTES = 2**16  # read and discarded after an answer
PIECE_BYTES = 2**16  # of a body, sent at once
CONNECTION_SECONDS = 5.0  # lifetime of a connection, without the next limit
SLOWEST_BYTES_PER_SECOND = 100_000  # a body extends the lifetime by its time at this rate; matters for films only
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
        `is_loopback`: the address is a loopback one. Then a request whose Host is another machine gets code 403: it is
        of a page elsewhere whose name leads here (DNS rebinding). One without Host is of no browser. Other addresses
        have names that only the network knows, so any Host is accepted there.
        """
        BaseServer.__init__(self, listener.getsockname(), _Handler)
        self.socket = listener
        self.answer, self.is_loopback = answer, is_loopback
        self._connections: dict[socket.socket, None] = {}  # oldest first
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and frees the address."""
        self.shutdown()
        self._thread.join()
        self.server_close()

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
            _log.exception("a request failed")


class _Handler(BaseHTTPRequestHandler):
    """Serves one connection, which has one request."""

    server: HttpServer
    protocol_version = default_request_version = request_version = "HTTP/1.1"
    requestline = command = ""

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
            self._send_head(answer, size := body.seek(0, io.SEEK_END))
            until = self._until + size / SLOWEST_BYTES_PER_SECOND
            body.seek(0)
            while self.command != "HEAD" and (piece := body.read(PIECE_BYTES)):
                self.connection.settimeout(max(0.01, until - time.monotonic()))
                self.wfile.write(piece)

    def _send_head(self, answer: Answer, body_bytes: int) -> None:
        self.send_response(answer.status)
        headers = {"Content-Type": answer.content_type, "Content-Length": str(body_bytes), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff", "Connection": "close"}
        headers |= {"Allow": "GET, HEAD"} if answer.status == 405 else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

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


def error_answer(status: int, message: str) -> Answer:
    """Returns an error as JSON."""
    return Answer(status, "application/json", json.dumps({"error": message}).encode() + b"\n")
