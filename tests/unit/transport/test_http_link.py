"""The servers of HTTP: GET and HEAD, errors in JSON; the status page answers with the report, to which hosts."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from apex_jax.transport import http_link
from apex_jax.transport.http_link import Answer, HttpServer, StatusError, fetch
from tests.rigs.links import free_address, wait_until
from tests.rigs.pages_served import ask
from tests.rigs.statuses import Served, served, speak

__all__ = ["served"]

GOOD = b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = bytes(range(256)) * 2**14  # more than the buffers of a socket


# Any server -----------------------------------------------------------------------------------------------------


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


# The status -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/status", "/"])
def test_report_is_json_with_200_when_healthy_and_503_when_not(served: Served, path: str) -> None:
    for served.healthy, status in ((True, b"200 OK"), (False, b"503 Service Unavailable")):
        head, _, body = served.answer(f"GET {path} HTTP/1.1\r\n\r\n".encode()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status + b"\r\n")
        assert b"Content-Type: application/json" in head
        assert f"Content-Length: {len(body)}".encode() in head
        assert json.loads(body) == served.content
        assert fetch(served.address, 5.0) == (served.healthy, served.content)


@pytest.mark.parametrize(("request_bytes", "status"), [
    (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
    (b"POST /status HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
    (b"\x00\xff garbage\r\n\r\n", b"400"),
    (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", b"404"),
    (b"GET /status HTTP/2\r\n\r\n", b"400"),
    (b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000, b"431"),
], ids=lambda value: value[:24].decode("latin1"))  # fmt: skip
def test_other_requests_are_refused_with_the_reason(served: Served, request_bytes: bytes, status: bytes) -> None:
    reply = served.answer(request_bytes)
    assert reply.startswith(b"HTTP/1.1 " + status)
    assert fetch(served.address, 5.0)[0]


@pytest.mark.parametrize(("place", "status"), [("127.0.0.1", b"403"), ("0.0.0.0", b"200")])
def test_name_of_another_machine_is_refused_on_loopback_only(place: str, status: bytes) -> None:
    served = Served(free_address().replace("127.0.0.1", place))
    assert served.answer(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n").startswith(b"HTTP/1.1 " + status)
    assert served.answer(GOOD).startswith(b"HTTP/1.1 200")
    served.server.close()


def samples_of(served: Served) -> list[tuple[str, dict[str, str], float]]:
    """Returns what Prometheus reads: name, labels and value of each sample."""
    head, _, body = served.answer(b"GET /metrics HTTP/1.1\r\n\r\n").decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert "Content-Type: text/plain; version=0.0.4" in head
    samples = [sample for family in text_string_to_metric_families(body) for sample in family.samples]
    return [(sample.name, sample.labels, sample.value) for sample in samples]


def test_prometheus_reads_every_number_of_the_report(served: Served) -> None:
    served.content |= {
        "metrics": {"learner/updates": 5, "charts/learning_rate": 6.25e-5, "losses/td_loss": None},
        "peers": {"replay": "joined", "weights_clients": 2},
        "actors": [{"steps_per_second": 1.0}],
        "healthy": True,
    }
    samples = samples_of(served)
    assert {name: value for name, _, value in samples} == {
        "apex_jax_learner_updates": 5.0,
        "apex_jax_charts_learning_rate": 6.25e-5,
        "apex_jax_peers_weights_clients": 2.0,
        "apex_jax_healthy": 1.0,
    }
    assert all(labels == {"role": "learner", "name": "learner"} for _, labels, _ in samples)


def test_prometheus_reads_the_report_of_each_process_of_a_local_run_under_its_own_name(served: Served) -> None:
    learner = {"role": "learner", "name": "learner", "metrics": {"learner/updates": 5}, "healthy": True}
    actor = {"role": "actor", "name": "actor-0", "metrics": {}, "healthy": False}
    served.content |= {"role": "local", "name": "local", "reports": {"learner": learner, "actor-0": actor}, "pid": 7}
    assert sorted((name, labels["role"], labels["name"], value) for name, labels, value in samples_of(served)) == [
        ("apex_jax_healthy", "actor", "actor-0", 0.0),
        ("apex_jax_healthy", "learner", "learner", 1.0),
        ("apex_jax_learner_updates", "learner", "learner", 5.0),
        ("apex_jax_pid", "local", "local", 7.0),
    ]


def test_slow_and_silent_clients_block_no_others_and_are_dropped(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_link._Handler, "timeout", 0.5)
    clients = [served.connect() for _ in range(100)]
    for client in clients[::2]:
        client.sendall(b"GET /sta")  # and no more
    assert fetch(served.address, 5.0)[0]
    for client in clients:
        assert client.recv(1) == b"", "closed by the server"
        client.close()


def test_clients_leave_no_file_descriptor_behind(served: Served) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    served.answer(GOOD)
    before = descriptors()
    for _ in range(200):
        served.answer(GOOD)
        served.connect().close()
    wait_until(lambda: descriptors() <= before)


def test_address_of_a_living_process_is_not_taken_over(served: Served) -> None:
    with pytest.raises(StatusError, match=rf"addresses\.status={served.address} .*choose a free"):
        Served(served.address)
    assert fetch(served.address, 5.0)[0]


# The client -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", [
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n[1, 2]",
    b"HTTP/1.1 200 OK\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
    b"HTTP/1.1 404 Not Found\r\n\r\n{\"role\": \"x\"}",
    b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (2**20 + 70_000),
], ids=["ssh", "a list", "no role", "deep", "404", "long"])  # fmt: skip
def test_reply_that_is_no_status_is_a_one_line_error(reply: bytes) -> None:
    def send(client: socket.socket) -> None:
        try:
            client.sendall(reply)
        except OSError:
            return

    with pytest.raises(StatusError, match="answers, but not as an apex_jax process") as caught:
        fetch(speak(send), 5.0)
    assert str(caught.value).isprintable()
