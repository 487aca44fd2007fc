"""A replay server for tests, and peers that the test controls and that break the protocol."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import zmq

from apex_jax.config import Config
from apex_jax.segment_codec import encode_segment
from apex_jax.transport import sockets
from apex_jax.transport.messages import ActorHello, ActorWelcome, LearnerHello, LearnerWelcome, SegmentAck
from apex_jax.types import SegmentRecord, SegmentSpec
from apex_jax.workers.replay_server import ReplayServer
from apex_jax.workers.role import RoleContext
from tests.rigs.links import SPEC, TRANSITIONS, Peer, segment_of, wait_until

BODY = encode_segment(segment_of(1), SPEC)


class Served:
    """A replay server that serves while a test waits, and peers that the test controls."""

    def __init__(self, config: Config, spec: SegmentSpec = SPEC) -> None:
        self.config, self._spec = config, spec
        self.context = zmq.Context()
        self._start_server()
        self.now_seconds = 0.0
        self.peers: list[Peer] = []

    def serve(self) -> None:
        self.now_seconds += 1e-3
        self.server.serve(self.now_seconds)

    def peer(self, link: str) -> Peer:
        socket = sockets.connect(link, self.context, getattr(self.config.addresses, link))
        self.peers.append(Peer(socket, self.serve))
        return self.peers[-1]

    def actor(self, peer_id: int, acknowledged: int = 0) -> Peer:
        peer = self.peer("experience")
        peer.send(ActorHello(peer_id, self.config.compatibility_key, 4, acknowledged))
        peer.receive(ActorWelcome)
        return peer

    def learner(self, peer_id: int = 5, environment_steps: int = 0) -> Peer:
        peer = self.peer("sampling")
        peer.send(
            LearnerHello(peer_id, self.config.compatibility_key, environment_steps, batches_at_once=1, batch_size=4)
        )
        peer.receive(LearnerWelcome)
        return peer

    def until(self, condition: Callable[[], Any]) -> None:
        wait_until(condition, self.serve)

    def restart(self) -> None:
        """Kills the server and restarts it from its journal."""
        self._end_server()
        self._start_server()

    def close(self) -> None:
        for peer in self.peers:
            peer.socket.close(linger=0)
        self.context.term()
        self._end_server()

    def _start_server(self) -> None:
        self.role = RoleContext(self.config, zmq.Context(), "replay")
        self.server = ReplayServer(self.role, self._spec)

    def _end_server(self) -> None:
        self.server.close()
        self.role.sockets.term()  # the addresses are free when this returns


def segment(peer_id: int, sequence: int, produced: int = TRANSITIONS) -> SegmentRecord:
    return SegmentRecord(peer_id, sequence, produced, TRANSITIONS, BODY, zlib.crc32(BODY))


def stores_for(served: Served, actor: Peer, peer_id: int, sequence: int) -> None:
    actor.send(segment(peer_id, sequence))
    while actor.receive(SegmentAck).sequence < sequence:
        pass
