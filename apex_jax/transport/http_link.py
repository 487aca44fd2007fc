"""HTTP/1.1 by Python's standard library, for the status of a process and the page of a run."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer, TCPServer, ThreadingMixIn
from typing import Any, BinaryIO, NamedTuple

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
