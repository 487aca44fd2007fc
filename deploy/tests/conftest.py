"""The settings of tests/conftest.py for all tests, JAX on the CPU and a cache of their own; and a status address."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

import tests.conftest  # noqa: F401 - for what its import sets


class StatusServer(HTTPServer):
    """Answers as a role's status address does, with this code and content."""

    code = 200
    content: Any = None

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    """One request."""

    server: StatusServer

    def do_GET(self) -> None:
        self.send_response(self.server.code if self.path == "/status" else 404)
        self.end_headers()
        self.wfile.write(json.dumps(self.server.content).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


@pytest.fixture
def server() -> Iterator[StatusServer]:
    with StatusServer(("127.0.0.1", 0), Answer) as started:
        threading.Thread(target=started.serve_forever, daemon=True).start()
        yield started
        started.shutdown()
