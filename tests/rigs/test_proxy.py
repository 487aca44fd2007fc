"""The conditions of the proxy that a network test would not miss: latency, bandwidth and late ends."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from tests.rigs.proxy import CHUNK_BYTES, Proxy

SHORT_SECONDS = 0.3


class Echo(socketserver.BaseRequestHandler):
    """Returns what it receives."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            while data := self.request.recv(65536):
                self.request.sendall(data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Proxy(f"tcp://127.0.0.1:{server.server_address[1]}") as proxy:
            yield proxy
        server.shutdown()


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(proxy.address.rpartition(":")[2])), timeout=10)


def test_latency_delays_without_reducing_bandwidth(proxy: Proxy) -> None:
    proxy.conditions.latency_seconds = SHORT_SECONDS
    with connect(proxy) as client:
        started = time.monotonic()
        client.sendall(b"x")
        assert client.recv(100) == b"x"
        assert time.monotonic() - started >= 2 * SHORT_SECONDS, "there and back"
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
        client.recv(65536)
        passed = proxy.traffic.up_bytes
        assert passed <= 100_000 * (time.monotonic() - started) + 2 * CHUNK_BYTES
