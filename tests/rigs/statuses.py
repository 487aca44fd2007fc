"""A status server whose report a test sets, and a server whose bytes a test sets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from apex_jax.transport.addresses import split
from apex_jax.transport.http_link import StatusServer
from tests.rigs.links import free_address


class Served:
    """A status server whose report the test sets."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.healthy = True
        self.content: dict[str, Any] = {"role": "learner", "name": "learner"}
        self.server = StatusServer(address, lambda: (self.healthy, self.content))

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", split(self.address).port), timeout=10)

    def answer(self, request: bytes) -> bytes:
        with self.connect() as client:
            client.sendall(request)
            reply = b""
            while data := client.recv(65536):
                reply += data
        return reply


def speak(reply: Callable[[socket.socket], None]) -> str:
    """Returns the address of a server that treats one client like this."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as client:
            client.recv(4096)
            reply(client)

    threading.Thread(target=serve, daemon=True).start()
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def served() -> Iterator[Served]:
    """A status server on a port of its own."""
    served = Served(free_address())
    yield served
    served.server.close()
