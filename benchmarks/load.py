"""Peers of a process under test: actors that send recorded segments, a client that draws, a sink for segments.

All use the real protocol over real sockets, but do not act, learn or store.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections import Counter, deque
from multiprocessing.sharedctypes import Synchronized
from typing import Any, NamedTuple

import numpy as np
import zmq

from apex_jax.process import new_peer_id
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    NO_COUNTS,
    ActorHello,
    ActorStatus,
    ActorWelcome,
    Credit,
    EpisodeStatistics,
    Goodbye,
    IndexBatches,
    LearnerHello,
    LearnerWelcome,
    PriorityUpdate,
    SegmentAck,
    StreamedSegments,
)
from apex_jax.transport.security import NO_KEYS, LinkContext, Security
from apex_jax.types import SegmentRecord

PATIENCE_SECONDS = 60.0
SEGMENTS_WINDOW = 256


class SimulatedActor:
    """One connection that sends segments while it has credit."""

    def __init__(self, context: zmq.Context, address: str, compatibility_key: str):
        """Connects; `read` sends the hello."""
        self.socket = sockets.connect_experience(context, address)
        self.peer_id = new_peer_id()
        self._hello = ActorHello(self.peer_id, compatibility_key, num_environments=1)
        self._credit = 0  # 0 until welcomed
        self._sequence = self._acknowledged = 0
        self._next_sign = 0.0

    def read(self, now_seconds: float) -> None:
        """Handles the server's messages, and sends a hello or, once welcomed, a heartbeat, once a second."""
        while (message := sockets.receive(self.socket, (ActorWelcome, SegmentAck))) is not None:
            if isinstance(message, ActorWelcome):
                self._credit = message.max_outstanding_segments
            else:
                self._acknowledged = message.sequence
        if now_seconds >= self._next_sign:
            sockets.send(self.socket, ActorStatus(self.peer_id, 0.0, 0) if self._credit else self._hello)
            self._next_sign = now_seconds + 1.0

    @property
    def is_welcome(self) -> bool:
        """Returns whether the server has welcomed this actor."""
        return self._credit > 0

    def send(self, message: SegmentRecord) -> bool:
        """Sends a segment if there is credit for it; returns whether it was sent."""
        if self._sequence - self._acknowledged >= self._credit:
            return False
        number, produced = self._sequence + 1, (self._sequence + 1) * message.transitions
        message = message._replace(peer_id=self.peer_id, sequence=number, produced=produced)
        sent = sockets.send(self.socket, message)
        self._sequence += sent
        return sent


class ActorLoad:
    """A process of simulated actors that together send segments at a given rate; 0 = as many as the server accepts."""

    def __init__(
        self,
        address: str,
        compatibility_key: str,
        messages: list[SegmentRecord],
        num_actors: int,
        segments_per_second: float,
        cores: set[int] | None,
        security: Security = NO_KEYS,
    ):
        """Starts the process. `cores`: allowed cores, None = all; `security`: the actors' keys, if any."""
        context = multiprocessing.get_context("spawn")
        self._sent: Synchronized[int] = context.Value("q", 0)
        self._rate: Synchronized[float] = context.Value("d", segments_per_second)
        self._stop = context.Event()
        arguments = (
            address,
            compatibility_key,
            messages,
            num_actors,
            self._rate,
            cores,
            security,
            self._sent,
            self._stop,
        )
        self._process = context.Process(target=_send_segments, args=arguments, daemon=True)
        self._process.start()

    @property
    def sent_segments(self) -> int:
        """Segments sent so far."""
        return self._sent.value

    def set_rate(self, segments_per_second: float) -> None:
        """Changes the rate at which the actors together send segments."""
        self._rate.value = segments_per_second

    def close(self) -> None:
        """Ends the process."""
        self._stop.set()
        self._process.join()


def _send_segments(
    address: str,
    compatibility_key: str,
    messages: list[SegmentRecord],
    num_actors: int,
    rate: Any,
    cores: set[int] | None,
    security: Security,
    sent: Any,
    stop: Any,
) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    context = LinkContext.of(security)
    actors = [SimulatedActor(context, address, compatibility_key) for _ in range(num_actors)]
    supply = itertools.cycle(messages)
    message = next(supply)
    allowance, before = 0.0, time.monotonic()
    while not stop.is_set():
        now = time.monotonic()
        allowance = min(allowance + (now - before) * rate.value, rate.value) if rate.value else float(num_actors)
        before, progress = now, 0
        for actor in actors:
            actor.read(now)
            while allowance >= 1 and actor.send(message):
                message = next(supply)
                allowance -= bool(rate.value)
                progress += 1
                if rate.value:
                    break  # one segment per actor and turn
        sent.value += progress
        if not progress:
            time.sleep(0.02 if rate.value else 0.001)
    for actor in actors:
        actor.socket.close()
    context.term()


class Sink:
    """Welcomes actors and acknowledges their segments as a replay server does, on a thread; stores nothing."""

    def __init__(self, context: zmq.Context, address: str):
        """Binds the socket and starts the thread."""
        self._socket = sockets.serve_experience(context, address)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        kinds = (ActorHello, ActorStatus, SegmentRecord, EpisodeStatistics, Goodbye)
        with self._socket as socket:
            while not self._closing.is_set():
                socket.poll(200)
                while (received := sockets.receive_from(socket, kinds, Counter())) is not None:
                    identity, message = received
                    if isinstance(message, ActorHello):
                        ladder_indices = np.arange(message.num_environments, dtype=np.int32)
                        sockets.send(socket, ActorWelcome(1, ladder_indices, max(2, len(ladder_indices)), 64), identity)
                    elif isinstance(message, SegmentRecord):
                        sockets.send(socket, SegmentAck(message.sequence), identity)


class DrawFigures(NamedTuple):
    """The speed of the server, measured by a client."""

    batches_per_second: float
    latency_milliseconds: list[float]  # from request to arrival of a group of batches: median, 99th percentile, maximum


class DrawingClient:
    """Draws groups of `batches_at_once` batches, and sends new priorities for all transitions drawn."""

    def __init__(
        self,
        address: str,
        compatibility_key: str,
        batches_at_once: int,
        batch_size: int,
        groups: int,
        security: Security = NO_KEYS,
    ):
        """Joins the server and keeps `groups` groups of batches requested at any time."""
        self._context = LinkContext.of(security)
        self._socket = sockets.connect_sampling(self._context, address)
        self._peer_id = new_peer_id()
        self._batches_at_once, self._batch_size = batches_at_once, batch_size
        rng = np.random.default_rng(0)
        self._priorities = rng.random(batches_at_once * batch_size).astype(np.float32) + 1e-3
        self._asked_seconds: deque[float] = deque()
        hello = LearnerHello(self._peer_id, compatibility_key, 0, batches_at_once, batch_size)
        until = time.monotonic() + PATIENCE_SECONDS
        while not isinstance(self._receive(), LearnerWelcome):
            sockets.send(self._socket, hello)
            self._socket.poll(200)
            assert time.monotonic() < until, f"no replay server answers at {address}"
        self._ask(groups, SEGMENTS_WINDOW)

    def draw(self, seconds: float) -> DrawFigures:
        """Draws for `seconds`; returns the figures."""
        latencies: list[float] = []
        start = now = time.monotonic()
        next_sign = start + 1.0
        while now < start + seconds:
            if now >= next_sign:
                self._ask(0, 0)
                next_sign = now + 1.0
            self._socket.poll(100)
            while (message := self._receive()) is not None:
                if isinstance(message, StreamedSegments):
                    self._ask(0, len(message.slots))
                elif isinstance(message, IndexBatches):
                    latencies.append(time.monotonic() - self._asked_seconds.popleft())
                    self._answer(message)
            now = time.monotonic()
        return DrawFigures(
            batches_per_second=len(latencies) * self._batches_at_once / (now - start),
            latency_milliseconds=(1e3 * np.quantile(latencies, (0.5, 0.99, 1.0))).tolist() if latencies else [],
        )

    def close(self) -> None:
        """Sends a goodbye and disconnects; without it, the server would store nothing until it evicts this client."""
        self._send(Goodbye(self._peer_id))
        self._socket.close()
        self._context.term()

    def _receive(self) -> Any:
        """Returns the next message or None; the server's heartbeat is its echo of an empty `Credit`."""
        return sockets.receive(self._socket, (LearnerWelcome, StreamedSegments, IndexBatches, Credit))

    def _ask(self, groups: int, segments: int) -> None:
        self._asked_seconds.extend([time.monotonic()] * groups)
        counts = np.full((groups, self._batches_at_once), self._batch_size, np.int32)
        self._send(Credit(self._peer_id, segments, counts if groups else NO_COUNTS))

    def _answer(self, batches: IndexBatches) -> None:
        indices, generations = batches.indices.ravel(), batches.generations.ravel()
        self._send(PriorityUpdate(self._peer_id, indices, generations, self._priorities))
        self._ask(1, 0)

    def _send(self, message: Any) -> None:
        while not sockets.send(self._socket, message):
            self._socket.poll(1, zmq.POLLOUT)


def split_cores() -> tuple[set[int], set[int]]:
    """Returns one core for the server, and the machine's other cores, if any, for its peers."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}
