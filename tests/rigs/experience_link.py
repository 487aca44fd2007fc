"""Both ends of the experience link for its tests."""

from __future__ import annotations

import zlib
from functools import partial

from apex_jax.links.connection import LinkEnd
from apex_jax.links.experience_server import ExperienceServer
from apex_jax.replay.rate_limiter import RateLimiter
from apex_jax.segment_codec import decode_frames, encode_segment
from apex_jax.transport import sockets
from apex_jax.transport.messages import ActorHello, ActorWelcome
from apex_jax.types import SegmentRecord
from tests.rigs.links import (
    CONFIG,
    SPEC,
    TRANSITIONS,
    CountingStream,
    Ends,
    Peer,
    ServerEnd,
    free_limiter,
    replay_of,
    segment_of,
    wait_until,
)

CREDIT = CONFIG.actor.max_outstanding_segments
KEY = CONFIG.compatibility_key


def limiter_that_lets_in(num_segments: int) -> RateLimiter:
    """A limiter that `sample` opens: one segment for as many samples as it has transitions."""
    return RateLimiter(1, 1.0, num_segments * TRANSITIONS - 1)


class Server(ServerEnd):
    """The replay server's side, with the test's clock."""

    def __init__(self, address: str, limiter: RateLimiter) -> None:
        super().__init__(partial(sockets.serve, "experience"), address, replay_of(limiter=limiter))
        self.now_seconds = 0.0
        self.service = ExperienceServer(self.socket, CONFIG, SPEC, self.replay)
        self.dropped = self.service.dropped

    def serve(self) -> None:
        self.service.read(self.now_seconds)
        self.service.store(self.now_seconds)

    def stored(self) -> list[int]:
        """Numbers of the segments, in the order in which they were stored."""
        bodies = self.buffer.segments_since(0, 10**6).bodies
        return [int(decode_frames(body, SPEC)[0, 0]) for body in bodies]


class Link(Ends):
    """Both ends of an experience link."""

    def server(self, limiter: RateLimiter | None = None) -> Server:
        self.servers.append(server := Server(self.address, limiter or free_limiter()))
        return server

    def stream(
        self,
        peer_id: int = 1,
        compatibility_key: str = CONFIG.compatibility_key,
        queue_size: int = 2,
        overflow: str = "wait",
    ) -> CountingStream:
        hello = ActorHello(peer_id, compatibility_key, num_environments=4)
        self.clients.append(
            stream := CountingStream(LinkEnd(self.context, self.address), SPEC, hello, queue_size, overflow)
        )
        return stream

    def peer(self, server: Server, peer_id: int | None = None) -> Peer:
        """A peer that the test controls; it joins if it is given a peer id."""
        peer = Peer(sockets.connect("experience", self.context, self.address), server.serve)
        self.clients.append(peer.socket)
        if peer_id is not None:
            join(peer, peer_id)
        return peer


def join(peer: Peer, peer_id: int) -> ActorWelcome:
    peer.send(ActorHello(peer_id, CONFIG.compatibility_key, num_environments=4))
    return peer.receive(ActorWelcome)


def message_of(number: int) -> SegmentRecord:
    body = encode_segment(segment_of(number), SPEC)
    return SegmentRecord(1, number, 10 * number, TRANSITIONS, body, zlib.crc32(body))


def put_all(stream: CountingStream, numbers: range, server: Server) -> None:
    for number in numbers:
        wait_until(partial(stream.put, segment_of(number), timeout_seconds=0.01), server.serve)
