"""The HTTP server answers GET and HEAD, and a failing or missing answer is an error in JSON."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from apex_jax.transport.http_link import Answer, HttpServer
from tests.rigs.pages_served import ask

LARGE = bytes(range(256)) * 2**14  # more than the buffers of a socket


def answer(path: str) -> Answer | None:
    if path == "/fails":
        raise ValueError("a secret of the process")
    answers = {"/": b"hello", "/large": LARGE}
    return Answer(200, "text/plain", answers[path]) if path in answers else None


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    server = HttpServer(listener, answer, "test", is_loopback=True)
    yield listener.getsockname()[1]
    server.close()


@pytest.mark.parametrize("path", ["/", "/?query=1", "/large"])
def test_head_has_the_headers_of_get_without_the_body(port: int, path: str) -> None:
    get, head = (ask(port, path, method=method) for method in ("GET", "HEAD"))
    assert (get.status, get.headers["Content-Type"]) == (200, "text/plain")
    assert get.body == (LARGE if path == "/large" else b"hello")
    assert head.body == b""
    assert {**head.headers, "Date": ""} == {**get.headers, "Date": ""}
    assert head.headers["Content-Length"] == str(len(get.body))


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/other", 404), ("HEAD", "/other", 404), ("GET", "/fails", 500), ("POST", "/", 405), ("DELETE", "/", 405),
])  # fmt: skip
def test_error_is_json_without_the_cause(port: int, method: str, path: str, status: int) -> None:
    reply = ask(port, path, method=method)
    assert (reply.status, reply.headers["Content-Type"]) == (status, "application/json")
    assert method == "HEAD" or list(json.loads(reply.body)) == ["error"]
    assert b"secret" not in reply.body
    assert ("Allow" in reply.headers) == (status == 405)
    assert ask(port, "/").status == 200
