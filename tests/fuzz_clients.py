"""The client ends as the fuzzer meets them, each with a false server, and a status page with false clients."""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from apex_jax.errors import RunError
from apex_jax.links import experience_client, sampling_client
from apex_jax.links.sampling_client import SamplingClient
from apex_jax.segment_codec import encode_segment
from apex_jax.transport import monitor, sockets, wire
from apex_jax.transport.messages import (
    ActorHello,
    ActorWelcome,
    Finish,
    IndexBatches,
    LearnerHello,
    LearnerWelcome,
    Refusal,
    Rejoin,
    SegmentAck,
    SegmentMessage,
    StreamedSegments,
)
from apex_jax.transport.status_link import StatusServer, fetch
from tests.fuzz_messages import Frames, Fuzzer, refusal_of
from tests.links import CONFIG, SPEC, CountingStream, free_address, segment_of
from tests.sampling_link import batches_of

GOOD_SECONDS = 30.0  # in which a good message must be served, whatever was sent before
WELCOME_MESSAGES = 100  # between two sound welcomes: without one a client takes little
CAPACITY = 64  # segments
ENVIRONMENTS = 4
TOO_LARGE_SHARE = 0.01  # that is sent of what the client cuts off: it then takes a moment to come back
HELD_OPEN = 100  # connections to a status page, more than it keeps


class ClientTarget:
    """A false server's end, to which a client of this process says hello again and again."""

    def __init__(self, kinds: list[type], serve: Any, seed: int, marker: str) -> None:
        self.crashes: Counter[str] = Counter()
        self.refusable: Counter[str] = Counter()
        self._expected = tuple(kinds)
        self.fuzzer = Fuzzer([*kinds * 4, *wire.MESSAGES], seed, CONFIG.agreement, marker)
        self.context = zmq.Context()
        self.address = free_address()
        self._patience = monitor.RECONNECT_SECONDS, sampling_client.HELLO_SECONDS, experience_client.HELLO_SECONDS
        monitor.RECONNECT_SECONDS = sampling_client.HELLO_SECONDS = experience_client.HELLO_SECONDS = 0.05
        self._socket = serve(self.context, self.address)
        self._identity: bytes | None = None
        self._sent = 0

    def send(self, frames: Frames) -> None:
        if self._sent % WELCOME_MESSAGES == 0:
            self.send_to_client(wire.encode(self.welcome()))
        self._sent += 1
        is_cut_off = max(map(len, frames)) > sockets.SMALL_MESSAGE_BYTES
        if ends_a_client(frames) or (is_cut_off and self.fuzzer.random.random() > TOO_LARGE_SHARE):
            return
        self.send_to_client(frames)
        if is_cut_off:
            self._identity = None  # it comes back under another name, and what follows would be lost
        if reason := refusal_of(frames, self._expected):
            self.refusable[reason] += 1
        if self._sent % 64 == 0:
            self.work()

    def send_to_client(self, frames: Any) -> None:
        """Sends to whoever said something last, once that can be; AssertionError where nobody comes."""
        deadline = time.monotonic() + GOOD_SECONDS
        while True:
            self.read()
            if self._identity is not None and self._has_sent(self._identity, frames):
                return
            self.work()
            self._socket.poll(1)
            assert time.monotonic() < deadline, f"the client does not come back; crashes: {self.crashes}"

    def read(self) -> list[Any]:
        """Returns what the client has said since the last time."""
        said = []
        while (received := sockets.receive_from(self._socket, wire.MESSAGES, Counter())) is not None:
            self._identity, message = received
            said.append(message)
        return said

    def welcome(self) -> Any:
        """Returns what makes the client take more."""
        raise NotImplementedError

    def work(self) -> None:
        """Does what the client's owner does."""
        raise NotImplementedError

    def end(self) -> None:
        """Ends the false server, after its client."""
        self._socket.close(linger=0)
        self.context.term()
        monitor.RECONNECT_SECONDS, sampling_client.HELLO_SECONDS, experience_client.HELLO_SECONDS = self._patience

    def _has_sent(self, identity: bytes, frames: Any) -> bool:
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # it is gone, and comes under another name
            self._identity = None
            return False
        return True


class LearnerTarget(ClientTarget):
    """A learner's stream, whose replay server is false."""

    def __init__(self, seed: int, marker: str) -> None:
        kinds = [
            StreamedSegments,
            StreamedSegments,
            IndexBatches,
            IndexBatches,
            LearnerWelcome,
            Refusal,
            Rejoin,
            Finish,
        ]
        super().__init__(kinds, sockets.serve_sampling, seed, marker)
        hello = LearnerHello(1, CONFIG.agreement, 0, batches_at_once=1, batch_size=1)
        self._stream = SamplingClient(self.context, self.address, SPEC, hello, CAPACITY, groups=4)
        self._taken: list[Any] = []

    def welcome(self) -> LearnerWelcome:
        return LearnerWelcome(9, CAPACITY)

    def work(self) -> None:
        try:
            while (item := self._stream.next(0.0)) is not None:
                self._stream.consumed(item)
                self._taken.append(item.content)
        except RunError as error:
            self.crashes[str(error)[:200]] += 1
        del self._taken[:-8]

    def serve_good(self) -> None:
        steps = self.fuzzer.random.randrange(10**12)
        good = batches_of(0, (1, 1), environment_steps=steps)
        deadline = time.monotonic() + GOOD_SECONDS
        while not any(getattr(content, "environment_steps", -1) == steps for content in self._taken):
            self.send_to_client(wire.encode(self.welcome()))
            self.send_to_client(wire.encode(good))
            for _ in range(20):
                self.read()
                self.work()
                self._socket.poll(10)
            assert self._stream._thread.is_alive(), f"the stream's thread died; crashes: {self.crashes}"
            assert time.monotonic() < deadline, f"good batches do not arrive; crashes: {self.crashes}"

    def dropped(self) -> Counter[str]:
        return self._stream.dropped

    def close(self) -> None:
        self._stream.close()
        self.end()


class ActorTarget(ClientTarget):
    """An actor's stream, whose replay server is false."""

    def __init__(self, seed: int, marker: str) -> None:
        kinds = [ActorWelcome, SegmentAck, SegmentAck, Rejoin, Refusal, Finish]
        super().__init__(kinds, sockets.serve_experience, seed, marker)
        hello = ActorHello(1, CONFIG.agreement, ENVIRONMENTS)
        self._stream = CountingStream(self.context, self.address, SPEC, hello, queue_size=4)
        self._number = 0

    def welcome(self) -> ActorWelcome:
        places = self.fuzzer._rng.permutation(8)[:ENVIRONMENTS].astype("int32")
        return ActorWelcome(self._sent + 1, places, ladder_size=8, max_outstanding_segments=4)

    def work(self) -> None:
        self._number += 1
        self._stream.put(segment_of(self._number % 1_000), 10, timeout_seconds=0.0)
        if self._stream.error is not None:
            self.crashes[str(self._stream.error)[:200]] += 1

    def serve_good(self) -> None:
        number = 1_000 + self.fuzzer.random.randrange(10**6)
        body = encode_segment(segment_of(number), SPEC)
        deadline, is_sent = time.monotonic() + GOOD_SECONDS, False
        while not is_sent:
            self.send_to_client(wire.encode(self.welcome()))
            for _ in range(20):
                # Again and again: what the fuzzer has acknowledged may still be unread, and be about the good one.
                self._stream.put(segment_of(number), 10, timeout_seconds=0.01)
                for message in self.read():
                    if isinstance(message, SegmentMessage):
                        is_sent |= message.body == body
                        self.send_to_client(wire.encode(SegmentAck(message.sequence)))
            assert self._stream._thread.is_alive(), f"the stream's thread died; crashes: {self.crashes}"
            assert time.monotonic() < deadline, f"a good segment does not arrive; crashes: {self.crashes}"

    def dropped(self) -> Counter[str]:
        return self._stream.dropped

    def close(self) -> None:
        self._stream.close()
        self.end()


class StatusTarget:
    """A status page, and clients that send it anything but sound HTTP."""

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
        assert self._server._thread.is_alive(), "the page's thread died"
        assert fetch(f"ipc://{self._path}", 10.0) == (True, {"role": "learner"})

    def dropped(self) -> Counter[str]:
        return Counter({f"answer_{code}": number for code, number in self._answers.items() if code != "200"})

    def close(self) -> None:
        while self._held:
            self._held.pop().close()
        self._server.close()


class HttpFuzzer:
    """Makes requests, and what is left of them after mutation, in pieces; the same ones for the same seed."""

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


def ends_a_client(frames: Frames) -> bool:
    """Tells whether a false server would end its client, as a true one may."""
    try:
        message = wire.decode(frames)
    except wire.WireError:
        return False
    if isinstance(message, LearnerWelcome):
        return message.capacity_segments != CAPACITY
    return isinstance(message, Finish) or (isinstance(message, Refusal) and message.final)
