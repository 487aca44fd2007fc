"""Helpers for tests of the links: small segments, a deadline, and a peer that the test controls."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_type_hints

import numpy as np
import zmq

from apex_jax.config import ActorConfig, Config, LearnerConfig
from apex_jax.links.experience_client import ExperienceClient
from apex_jax.links.experience_server import ExperienceServer
from apex_jax.replay.rate_limiter import RateLimiter
from apex_jax.replay.replay import Replay
from apex_jax.transport import sockets, wire
from apex_jax.types import ActionSpec, Columns, Integer, Real, Segment, SegmentSpec
from tests.rigs.ports import free_port

SPEC = SegmentSpec(
    frame_shape=(3,), frame_dtype="float32", frame_stack=2, slots=8, n_step=1, action=ActionSpec.discrete(2)
)
TRANSITIONS = SPEC.max_transitions  # of every segment of `segment_of`
CONFIG = Config(
    actor=replace(ActorConfig(), environments=4, ladder_size=8, max_outstanding_segments=4),
    learner=replace(LearnerConfig(), batch_size=16, updates_per_call=2),
)
DEADLINE_SECONDS = 60.0
Kind = TypeVar("Kind")


def segment_of(number: int) -> Segment:
    """A full segment whose pixels all have the value `number`."""
    starts = np.zeros(SPEC.slots, bool)
    starts[SPEC.frame_stack - 1 : -SPEC.n_step] = True
    columns: Columns = dict(
        priority=np.where(starts, number + 1, 0).astype(np.float32),
        n_step_return=np.zeros(SPEC.slots, np.float32),
        discount=starts * np.float32(0.9),
        action=np.zeros(SPEC.slots, np.int32),
        bootstrap_offset=starts.astype(np.uint8),
    )
    return Segment(np.full((SPEC.slots, *SPEC.frame_shape), number, np.float32), columns)


class CountingStream(ExperienceClient):
    """Counts transitions when a segment is put; usually the actor counts them."""

    def put(self, segment: Segment, timeout_seconds: float) -> bool:
        transitions = int(np.count_nonzero(segment.columns["priority"]))
        self.produced += transitions  # before it can be on its way
        is_taken = super().put(segment, timeout_seconds)
        self.produced -= 0 if is_taken else transitions
        return is_taken


def highest(kind: type, field: str) -> Any:
    """Returns the largest number that this field can have."""
    mark = get_type_hints(kind, include_extras=True)[field].__metadata__[0]
    assert isinstance(mark, Integer | Real)
    return mark.high


def replay_of(num_segments: int = 64, limiter: RateLimiter | None = None) -> Replay:
    """A replay without a journal, with a rate limiter that the test chooses."""
    in_memory = replace(CONFIG.replay, journal=False, capacity_transitions=num_segments * TRANSITIONS)
    replay = Replay(CONFIG.replace(replay=in_memory), SPEC, np.random.default_rng(0))
    replay.limiter = limiter or free_limiter()
    return replay


def free_limiter() -> RateLimiter:
    return RateLimiter(1, 0.0, 0.0)


def free_address() -> str:
    """A tcp address that nobody serves."""
    return f"tcp://127.0.0.1:{free_port()}"


def wait_until(condition: Callable[[], Any], meanwhile: Callable[[], Any] = lambda: None) -> None:
    """Calls `meanwhile` until `condition` is true; fails after the deadline."""
    deadline, pause = time.monotonic() + DEADLINE_SECONDS, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        meanwhile()
        pause.wait(0.005)


def waiting_in(server: ExperienceServer) -> int:
    """Number of received segments that are not stored yet."""
    return sum(len(actor.waiting) for actor in server.actors.values())


class Peer:
    """One end of a link that the test controls, while `meanwhile` runs the other end."""

    def __init__(self, end: zmq.Socket, meanwhile: Callable[[], Any]) -> None:
        self.socket = end
        self.meanwhile = meanwhile

    def send(self, *messages: Any) -> None:
        for message in messages:
            wait_until(partial(sockets.send, self.socket, message), self.meanwhile)

    def send_frames(self, *frames: bytes) -> None:
        wait_until(lambda: self.socket.poll(0, zmq.POLLOUT), self.meanwhile)
        self.socket.send_multipart(frames)

    def receive(self, kind: type[Kind]) -> Kind:
        """Returns the next message, which must be of this kind."""
        received: list[Any] = []

        def arrived() -> bool:
            message = sockets.receive(self.socket, wire.MESSAGES)
            received.extend([message] if message is not None else [])
            return bool(received)

        wait_until(arrived, self.meanwhile)
        assert isinstance(received[0], kind), received[0]
        return received[0]

    def receives_nothing(self) -> bool:
        """Returns whether no message arrives after everything in flight has been served."""
        for _ in range(5):
            self.meanwhile()
            if self.socket.poll(10):
                return False
        return True


class FalseServer:
    """A server's end of a link that the test controls: it sends to the client from which it received last."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self.identity = b""

    def close(self) -> None:
        self._socket.close(linger=0)

    def receive(self, *kinds: type) -> Any:
        """Returns the next message that is of one of these kinds."""
        found: list[Any] = []

        def arrived() -> bool:
            received = sockets.receive_from(self._socket, wire.MESSAGES, Counter())
            if received is not None and isinstance(received[1], kinds):
                self.identity = received[0]
                found.append(received[1])
            return bool(found)

        wait_until(arrived)
        return found[0]

    def send(self, *messages: Any) -> None:
        for message in messages:
            frames = message if isinstance(message, list) else wire.encode(message)
            self._socket.send_multipart([self.identity, *frames])


class Ends:
    """Makes both ends of a link at an address of its own, and closes them after the test."""

    def __init__(self) -> None:
        self.address = free_address()
        self.context = zmq.Context()
        self.clients: list[Any] = []  # of this context: streams and sockets
        self.servers: list[Any] = []

    def close(self) -> None:
        for client in self.clients:
            client.close(linger=0) if isinstance(client, zmq.Socket) else client.close()
        self.context.term()  # which waits for ever if an end is still open
        for server in self.servers:
            server.close()


class ServerEnd:
    """The replay server's end of a link, which serves only while a test waits."""

    def __init__(self, serve: Callable[[zmq.Context, str], zmq.Socket], address: str, replay: Replay) -> None:
        self.replay, self.buffer, self.limiter = replay, replay.buffer, replay.limiter
        self._context = zmq.Context()
        self.socket = serve(self._context, address)

    def serve(self) -> None:
        raise NotImplementedError

    def until(self, condition: Callable[[], Any]) -> None:
        wait_until(condition, self.serve)

    def close(self) -> None:
        self.socket.close()
        self._context.term()  # the address is free when this returns
