"""A status page as a target of the fuzzer, with clients that send invalid HTTP."""

from __future__ import annotations

import random
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path

from apex_jax.transport.status_link import StatusServer, fetch
from tests.fuzz.messages import Frames

HELD_OPEN = 100  # connections to a status page, more than it keeps


class StatusTarget:
    """A status page, and clients that send invalid HTTP."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.crashes: Counter[str] = Counter()
        self.refusable: Counter[str] = Counter()  # what comes is HTTP, or should be: answered, not dropped
        self.fuzzer = HttpFuzzer(seed)
        self._path = str(directory / "status")
        self._server = StatusServer(f"ipc://{self._path}", lambda: (True, {"role": "learner"}))
        self._held: list[socket.socket] = []
        self._answers: Counter[str] = Counter()

    def send(self, frames: Frames) -> None:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(5.0)
        client.connect(self._path)
        with suppress(OSError):  # it was thrown out in the middle of a sentence
            for frame in frames:
                client.sendall(frame)
            if self.fuzzer.random.random() < 0.5:
                client.shutdown(socket.SHUT_WR)
                self._answers[client.recv(64)[9:12].decode() or "closed"] += 1
        self._held.append(client)
        if len(self._held) > HELD_OPEN or self.fuzzer.random.random() < 0.5:
            self._held.pop(self.fuzzer.random.randrange(len(self._held))).close()

    def serve_good(self) -> None:
        while self._held:
            self._held.pop().close()
        assert fetch(f"ipc://{self._path}", 10.0) == (True, {"role": "learner"})

    def dropped(self) -> Counter[str]:
        return Counter({f"answer_{code}": number for code, number in self._answers.items() if code != "200"})

    def close(self) -> None:
        while self._held:
            self._held.pop().close()
        self._server.close()


class HttpFuzzer:
    """Makes requests, mutates and splits them; deterministic for a seed."""

    REQUESTS = (
        b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"POST /status HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 100,
        b"GET /" + b"a" * 2_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
        b"GET /status HTTP/1.1\r\n" + b"A: b\r\n" * 3_000 + b"\r\n",
        b"HEAD /status?%00%ff HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\r\n\r\n",
    )

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def next(self) -> Frames:
        """Returns the pieces of the next request."""
        rng = self.random
        request = bytearray(rng.choice(self.REQUESTS))
        for _ in range(rng.choice((0, 1, 1, 3, 20))):
            place = rng.randrange(len(request))
            what = rng.choice((b"", b"\0", b"\r\n", b"\n", b"\xff", b" ", rng.randbytes(3), rng.randbytes(9_000)))
            request[place : place + rng.choice((0, 1, 1, 10))] = what
            request = request or bytearray(b"\0")
        if rng.random() < 0.1:
            del request[rng.randrange(len(request)) :]
        cut = rng.randrange(len(request) + 1)
        return [bytes(request[:cut]), bytes(request[cut:])]
