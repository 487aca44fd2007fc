"""Both ends of the sampling link for its tests, sound and false ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import zmq

from apex_jax.links.connection import LinkEnd
from apex_jax.links.sampling_client import Received, SamplingClient, Segments
from apex_jax.links.sampling_server import SamplingServer
from apex_jax.replay.rate_limiter import RateLimiter
from apex_jax.segment_codec import encode_segment
from apex_jax.transport import sockets
from apex_jax.transport.messages import Credit, IndexBatches, LearnerHello, LearnerWelcome, StreamedSegments
from tests.rigs.links import (
    CONFIG,
    SPEC,
    TRANSITIONS,
    Ends,
    FalseServer,
    Peer,
    ServerEnd,
    free_limiter,
    replay_of,
    segment_of,
    wait_until,
)

K, B = 2, 16
CAPACITY = 6  # segments
BETA = 0.4
L = SPEC.slots


def hello_of(peer_id: int = 1, environment_steps: int = 0, batches: int = K) -> Any:
    return LearnerHello(peer_id, CONFIG.compatibility_key, environment_steps, batches_at_once=batches, batch_size=B)


def streamed(*numbers: int, ring_slots: list[int] | None = None, bodies: list[bytes] | None = None) -> StreamedSegments:
    bodies = bodies or [encode_segment(segment_of(number), SPEC) for number in numbers]
    return StreamedSegments(
        ring_slots=np.array(ring_slots or [number - 1 for number in numbers], np.int32),
        generations=np.array(numbers, np.uint32),
        body_bytes=np.array([len(body) for body in bodies], np.int32),
        bodies=b"".join(bodies),
    )


def batches_of(index: int, shape: tuple[int, int] = (K, B)) -> IndexBatches:
    return IndexBatches(
        indices=np.full(shape, index, np.int32).ravel(),
        generations=np.ones(shape, np.uint32).ravel(),
        probabilities=np.ones(shape).ravel(),
        replay_id="0123456789abcdef",
        environment_steps=0,
        samples_per_insert=1.0,
        age_seconds=0.0,
    )


class Server(ServerEnd):
    """The replay server's side."""

    def __init__(self, address: str, limiter: RateLimiter, capacity: int = CAPACITY) -> None:
        super().__init__(partial(sockets.serve, "sampling"), address, replay_of(capacity, limiter))
        self.inserted = 0
        self.service = SamplingServer(self.socket, CONFIG, self.replay)
        self.dropped = self.service.dropped

    def insert(self, count: int = 1) -> None:
        for _ in range(count):
            segment = segment_of(self.inserted + 1)  # its number is that of its insertion
            self.buffer.insert(encode_segment(segment, SPEC), segment.columns, now_seconds=0.0)
            self.limiter.inserted += TRANSITIONS
            self.inserted += 1

    def serve(self) -> None:
        self.service.read(now_seconds=0.0)
        self.service.stream(now_seconds=1.0)


class Learner:
    """Consumes a stream like the learner, and records the segment in each slot of its frame store."""

    def __init__(self, stream: SamplingClient) -> None:
        self.stream = stream
        self.ring = np.zeros(CAPACITY, np.int64)
        self.history: list[int] = []  # numbers of the segments, in the order of their arrival
        self.batches: list[Received] = []

    def consume(self) -> Received | None:
        item = self.stream.next(0.0)
        if item is None:
            return None
        if isinstance(item.content, Segments):
            numbers = item.content.frames[:, 0, 0].astype(int)
            self.ring[item.content.ring_slots] = numbers
            self.history += numbers.tolist()
        else:
            slots = item.content.drawn.indices // L
            np.testing.assert_array_equal(self.ring[slots], item.content.drawn.generations, "from another segment")
            self.batches.append(item)
        self.stream.consumed(item)
        return item


def next_of(stream: SamplingClient) -> Received:
    """Waits for the next item."""
    wait_until(lambda: stream._items)
    item = stream.next(0.0)
    assert item is not None
    return item


class Link(Ends):
    """Both ends of a sampling link."""

    def server(self, limiter: RateLimiter | None = None, capacity: int = CAPACITY) -> Server:
        self.servers.append(server := Server(self.address, limiter or free_limiter(), capacity))
        return server

    def stream(self, hello: LearnerHello | None = None, draws: int = 2) -> SamplingClient:
        stream = SamplingClient(LinkEnd(self.context, self.address), SPEC, hello or hello_of(), CAPACITY, draws, BETA)
        self.clients.append(stream)
        return stream

    def peer(self, server: Server, hello: LearnerHello | None = None) -> Peer:
        """A peer that the test controls; it joins if it is given a hello."""
        peer = Peer(sockets.connect("sampling", self.context, self.address), server.serve)
        self.clients.append(peer.socket)
        if hello is not None:
            peer.send(hello)
            assert peer.receive(LearnerWelcome) == LearnerWelcome(server.buffer.capacity_segments)
        return peer


class FalseReplay(FalseServer):
    """A replay server's end that the test controls and that breaks the protocol."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        super().__init__(sockets.serve("sampling", self._context, address))

    def welcome(self) -> None:
        self.receive(LearnerHello)
        self.send(LearnerWelcome(CAPACITY))
        while self.receive(Credit).draws == 0:
            pass

    def close(self) -> None:
        super().close()
        self._context.term()
