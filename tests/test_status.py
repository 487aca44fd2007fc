"""The status page: what it says, to whom, and that nobody can harm it."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from apex_jax.errors import UsageError
from apex_jax.operations import status_command
from apex_jax.transport import status_link
from apex_jax.transport.addresses import Address, UnresolvedHost, resolve, split
from apex_jax.transport.status_link import MAX_CONNECTIONS, StatusError, StatusServer, fetch
from tests.links import free_address, wait_until

GOOD = b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n"


class Served:
    """A status server whose report the test sets."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.healthy = True
        self.content: dict[str, Any] = {"role": "learner", "name": "learner"}
        self.server = StatusServer(address, lambda: (self.healthy, self.content))

    def connect(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", split(self.address).port), timeout=10)
        return client

    def answer(self, request: bytes) -> bytes:
        with self.connect() as client:
            client.sendall(request)
            reply = b""
            while data := client.recv(65536):
                reply += data
        return reply


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(free_address())
    yield served
    served.server.close()


# The link ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/status", "/", "/status?pretty"])
def test_report_is_json_with_200_when_healthy_and_503_when_not(served: Served, path: str) -> None:
    for served.healthy, status in ((True, b"200 OK"), (False, b"503 Service Unavailable")):
        head, _, body = served.answer(f"GET {path} HTTP/1.1\r\n\r\n".encode()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status + b"\r\n")
        assert b"Content-Type: application/json" in head
        assert f"Content-Length: {len(body)}".encode() in head
        assert json.loads(body) == served.content
        assert fetch(served.address, 5.0) == (served.healthy, served.content)


@pytest.mark.parametrize(("request_bytes", "status"), [
    (b"GET /other HTTP/1.1\r\n\r\n", b"404"),
    (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
    (b"POST /status HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
    (b"DELETE / HTTP/1.0\r\n\r\n", b"405"),
    (b"\x00\xff garbage\r\n\r\n", b"400"),
    (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", b"404"),
    (b"GET /status HTTP/2\r\n\r\n", b"400"),
    (b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000, b"431"),
], ids=lambda value: value[:24].decode("latin1"))  # fmt: skip
def test_whatever_else_is_asked_is_refused_with_the_reason(served: Served, request_bytes: bytes, status: bytes) -> None:
    reply = served.answer(request_bytes)
    assert reply.startswith(b"HTTP/1.1 " + status)
    assert fetch(served.address, 5.0)[0]


def test_prometheus_reads_every_number_of_the_report(served: Served) -> None:
    served.content |= {
        "metrics": {"learner/updates": 5, "charts/learning_rate": 6.25e-5, "losses/td_loss": None},
        "peers": {"replay": "joined", "weights_clients": 2},
        "actors": [{"steps_per_second": 1.0}],
        "healthy": True,
    }
    head, _, body = served.answer(b"GET /metrics HTTP/1.1\r\n\r\n").decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert "Content-Type: text/plain; version=0.0.4" in head
    samples = [sample for family in text_string_to_metric_families(body) for sample in family.samples]
    assert {sample.name: sample.value for sample in samples} == {
        "apex_jax_learner_updates": 5.0,
        "apex_jax_charts_learning_rate": 6.25e-5,
        "apex_jax_peers_weights_clients": 2.0,
        "apex_jax_healthy": 1.0,
    }
    assert all(sample.labels == {"role": "learner", "name": "learner"} for sample in samples)


def test_slow_and_silent_clients_cost_nobody_else_an_answer(served: Served) -> None:
    clients = [served.connect() for _ in range(3 * MAX_CONNECTIONS)]
    for number, client in enumerate(clients):
        if number % 2:
            client.sendall(b"GET /sta")  # and no more, ever
    assert fetch(served.address, 5.0)[0]
    assert len(served.server._connections) <= MAX_CONNECTIONS
    for client in clients:
        client.close()
    wait_until(lambda: not served.server._connections)


def test_client_that_takes_too_long_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_link, "CONNECTION_SECONDS", 0.1)
    with served.connect() as client:
        client.sendall(b"GET /status HTTP/1.1\r\n")
        assert client.recv(1) == b"", "closed by the server"


def test_client_that_sends_without_end_is_disconnected_after_its_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_link, "CONNECTION_SECONDS", 600.0)
    with served.connect() as client, pytest.raises(ConnectionError):
        client.sendall(GOOD + bytes(2**26))  # more than both sockets buffer


def test_clients_leave_no_file_descriptor_behind(served: Served) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    served.answer(GOOD)
    wait_until(lambda: not served.server._connections)
    before = descriptors()
    for _ in range(200):
        served.answer(GOOD)
        served.connect().close()
    wait_until(lambda: not served.server._connections and descriptors() <= before)
    assert descriptors() <= before


def test_report_that_fails_is_500_and_the_next_one_is_served(served: Served) -> None:
    served.content = {"role": object()}
    assert served.answer(GOOD).startswith(b"HTTP/1.1 500")
    served.content = {"role": "actor"}
    assert fetch(served.address, 5.0) == (True, {"role": "actor"})


def test_socket_of_a_killed_process_is_taken_over_and_that_of_a_living_one_or_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "status"
    address = f"ipc://{path}"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert path.exists()
    living = Served(address)
    assert fetch(address, 5.0)[0]
    with pytest.raises(StatusError, match=r"addresses\.status=ipc://.* cannot be served: another process serves there"):
        Served(address)
    assert fetch(address, 5.0)[0]
    living.server.close()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(StatusError, match="it is a file; choose a free address"):
        Served(address)
    assert path.read_text() == "mine"


def test_port_in_use_is_one_line(served: Served) -> None:
    with pytest.raises(StatusError, match=rf"addresses\.status={served.address} cannot be served: .*; choose a free"):
        Served(served.address)


# The client -------------------------------------------------------------------------------------------------------


def speak(reply: Callable[[socket.socket], None]) -> str:
    """Returns the address of a server that treats one client like this."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as client:
            client.recv(4096)
            reply(client)

    threading.Thread(target=serve, daemon=True).start()
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("reply", [
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n[1, 2]",
    b"HTTP/1.1 200 OK\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
    b"HTTP/1.1 404 Not Found\r\n\r\n{\"role\": \"x\"}",
    b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (2**20 + 70_000),
], ids=["ssh", "a list", "no role", "deep", "404", "long"])  # fmt: skip
def test_what_is_no_status_is_one_line(reply: bytes) -> None:
    def send(client: socket.socket) -> None:
        try:
            client.sendall(reply)
        except OSError:
            return

    with pytest.raises(StatusError, match="answers, but not as an apex_jax process") as caught:
        fetch(speak(send), 5.0)
    assert str(caught.value).isprintable()


def test_server_that_never_comes_to_an_end_is_given_up() -> None:
    ended = threading.Event()

    def trickle(client: socket.socket) -> None:
        while not ended.wait(0.05):
            try:
                client.sendall(b"H")
            except OSError:
                return

    with pytest.raises(StatusError, match=r"has not answered within 0\.5 s|not as a process"):
        fetch(speak(trickle), 0.5)
    ended.set()


@pytest.mark.parametrize(
    "address", ["127.0.0.1:80", "tcp://127.0.0.1", "tcp://:80", "tcp://x:0", "udp://x:1", "", "ipc://"]
)
def test_what_is_no_address_is_wrong_usage(address: str) -> None:
    with pytest.raises(UsageError, match=r"give tcp://HOST:PORT or ipc://PATH"):
        status_command.run([address])


def test_addresses_are_taken_apart() -> None:
    assert split("tcp://[::1]:80") == Address("::1", 80, "")
    assert split("tcp://host:65535") == Address("host", 65535, "")
    assert split("ipc://a/b") == Address("", 0, "a/b")
    assert (socket.AF_INET, ("127.0.0.1", 80)) in resolve(split("tcp://127.0.0.1:80"), 5.0)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 300])
def test_host_that_nobody_knows_is_one_line(host: str) -> None:
    with pytest.raises(UnresolvedHost, match=r"there is no host|no name server answers") as caught:
        resolve(split(f"tcp://{host}:80"), 3.0)
    assert str(caught.value).isprintable()


def test_command_prints_a_table_that_no_stranger_can_write_escapes_into(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.content |= {
        "pid": 7,
        "uptime_seconds": 61.2,
        "progress_age_seconds": 75.0,
        "memory_bytes": 2**21,
        "rates": {"updates_per_second": 12.345},
        "peers": [{"run_id": "ab"}],
        "\x1b[2J": "\x1b]0;evil\x07",
    }
    assert status_command.run([served.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "learner (learner, pid 7): healthy, up 0:01:01"
    assert [line.split() for line in lines[1:4]] == [
        ["memory_bytes", "2.0", "MiB"],
        ["rates.updates_per_second", "12.35"],
        ["peers.0.run_id", "ab"],
    ]
    assert all(line.isprintable() for line in lines)
    served.healthy = False
    assert status_command.run([served.address]) == 1
    assert "NOT HEALTHY: no progress for 75.00 s" in capsys.readouterr().out
    assert status_command.run([served.address, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == served.content
