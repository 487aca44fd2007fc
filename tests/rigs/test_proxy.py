"""The proxy of the network tests: each fault is what its name says, and ends when it is healed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.rigs.links import wait_until
from tests.rigs.proxy import CHUNK_BYTES, Proxy

SHORT_SECONDS = 0.3  # in which what passes at all would have passed


class Echo:
    """A server that echoes its input and counts ended connections."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.ends: list[str] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
                self.ends.append("closed")
            except ConnectionError:
                self.ends.append("reset")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.address) as proxy:
        yield proxy


def connect(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.removeprefix("tcp://").rpartition(":")
    client = socket.create_connection((host, int(port)))
    client.settimeout(10)
    return client


def hears(client: socket.socket, seconds: float = SHORT_SECONDS) -> bytes:
    client.settimeout(seconds)
    try:
        return client.recv(65536)
    except TimeoutError:
        return b""
    finally:
        client.settimeout(10)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_stopped_bytes_arrive_after_healing_without_a_disconnect(proxy: Proxy, direction: str) -> None:
    with connect(proxy) as client:
        client.sendall(b"before")
        assert client.recv(100) == b"before"
        proxy.stop(direction)  # type: ignore[arg-type]
        client.sendall(b"meanwhile")
        assert hears(client) == b""
        assert proxy.traffic.up_bytes == len(b"before") + (0 if direction == "up" else len(b"meanwhile"))
        proxy.heal()
        assert client.recv(100) == b"meanwhile"


def test_a_reset_reaches_both_sides(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as client:
        client.sendall(b"hello")
        assert client.recv(100) == b"hello"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            client.recv(100)
        wait_until(lambda: echo.ends == ["reset"])
        assert proxy.open_connections == 0


def test_end_of_one_side_reaches_the_other_late(proxy: Proxy, echo: Echo) -> None:
    proxy.conditions.slow_close_seconds = SHORT_SECONDS
    with connect(proxy) as client:
        client.sendall(b"hello")
        assert client.recv(100) == b"hello"
    assert echo.ends == []
    wait_until(lambda: len(echo.ends) == 1)


def test_latency_delays_without_reducing_bandwidth(proxy: Proxy) -> None:
    proxy.conditions.latency_seconds = SHORT_SECONDS
    with connect(proxy) as client:
        client.sendall(b"x")
        assert hears(client, SHORT_SECONDS) == b"", "there and back takes twice as long"
        assert client.recv(100) == b"x"
        data = bytes(500_000)  # more than thirty chunks: one after the other they would take 20 s
        threading.Thread(target=client.sendall, args=(data,)).start()
        received = 0
        while received < len(data):
            received += len(client.recv(65536))


def test_bandwidth_is_limited(proxy: Proxy) -> None:
    proxy.conditions.bytes_per_second = 100_000
    with connect(proxy) as client:
        started = time.monotonic()
        client.sendall(bytes(200_000))
        heard, passed = len(hears(client, 0.2)), proxy.traffic.up_bytes
        at_most = 100_000 * (time.monotonic() - started) + 2 * CHUNK_BYTES
        assert heard <= passed <= at_most
