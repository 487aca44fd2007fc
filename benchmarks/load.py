"""Peers of a real replay server: actors that send recorded segments, and a client that draws.

Both use the real protocol over real sockets, but do not act or learn. The segments are real ones: a policy plays games
in EnvPool, and the actor's own code cuts them into segments.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
import zlib
from collections import deque
from multiprocessing.sharedctypes import Synchronized
from typing import Any, NamedTuple

import jax
import numpy as np
import zmq

from apex_jax.agent.registry import make_algorithm
from apex_jax.agent.segments import SegmentBuilder
from apex_jax.config import Config
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.process import new_peer_id
from apex_jax.segment_codec import encode_segment
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    ActorWelcome,
    Credit,
    Goodbye,
    IndexBatches,
    LearnerHello,
    LearnerWelcome,
    PriorityUpdate,
    SegmentAck,
    StreamedSegments,
)
from apex_jax.transport.security import NO_KEYS, LinkContext, Security
from apex_jax.types import Segment, SegmentRecord
from benchmarks.report import say

PAPER_TRANSITIONS_PER_SECOND = 12_500  # 360 actors of 139 frames/s, 4 frames a step
PAPER_BATCHES_PER_SECOND = 19
BATCH_SIZE = 512
GROUPS = {8: 4, 1: 16}  # batches per group: number of groups requested at any time
PATIENCE_SECONDS = 60.0
SEGMENTS_WINDOW = 256
ENVIRONMENTS = 16  # of a recording


class Recording(NamedTuple):
    """Segments of real games."""

    segments: list[Segment]
    messages: list[SegmentRecord]  # as an actor sends them; the sender sets peer id and sequence
    per_segment: float  # transitions that start in a segment, on average


def record(config: Config, count: int, exploration: float = 0.1) -> Recording:
    """Plays until `count` segments are full; actions are those of an untrained network, with this epsilon or noise."""
    say(f"recording {count} segments of {config.environment.task}")
    environment_spec = describe(config)
    spec = environment_spec.spec
    algorithm = make_algorithm(config, spec)
    params = algorithm.acting_params(algorithm.init(jax.random.key(1)))
    key = jax.random.key(2)
    seeds, frames = 1 + np.arange(ENVIRONMENTS), config.environment.max_episode_frames
    environment = VectorEnvironment(config, environment_spec, seeds, frames, threads=0)
    builder = SegmentBuilder(
        spec,
        ENVIRONMENTS,
        config.algorithm.discount,
        config.environment.reward_clip,
        config.environment.life_loss_terminates,
    )
    explorations = np.full(ENVIRONMENTS, exploration, np.float32)
    segments: list[Segment] = []
    for call in itertools.count():
        step = environment.receive()
        output = jax.device_get(algorithm.act(params, step.observation, explorations, key, call))
        environment.send(output.action, step.env_id)
        segments += builder.add(step, *output)
        if len(segments) >= count:
            break
    environment.close()
    del segments[count:]
    bodies = [encode_segment(segment, spec) for segment in segments]
    most = spec.max_transitions
    messages = [SegmentRecord(0, 1, most, most, body, zlib.crc32(body)) for body in bodies]
    transitions = sum(int(np.count_nonzero(segment.columns["priority"])) for segment in segments)
    return Recording(segments, messages, transitions / count)


class SimulatedActor:
    """One connection that sends segments while it has credit."""

    def __init__(self, context: zmq.Context, address: str, compatibility_key: str):
        """Connects; `read` sends the hello."""
        self.socket = sockets.connect("experience", context, address)
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
            sockets.send(self.socket, ActorStatus(0.0, 0) if self._credit else self._hello)
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
    """A process of simulated actors, which together send transitions at a given rate; 0 = as many as are accepted."""

    def __init__(
        self,
        address: str,
        config: Config,
        recording: Recording,
        num_actors: int,
        transitions_per_second: float = 0.0,
        cores: set[int] | None = None,
        security: Security = NO_KEYS,
    ):
        """Starts the process. `cores`: allowed cores, None = all; `security`: the actors' keys, if any."""
        self._per_segment = recording.per_segment
        context = multiprocessing.get_context("spawn")
        self._sent: Synchronized[int] = context.Value("q", 0)
        self._rate: Synchronized[float] = context.Value("d", transitions_per_second / self._per_segment)
        self._stop = context.Event()
        key, messages = config.compatibility_key, recording.messages
        arguments = (address, key, messages, num_actors, self._rate, cores, security, self._sent, self._stop)
        self._process = context.Process(target=_send_segments, args=arguments, daemon=True)
        self._process.start()

    @property
    def sent_transitions(self) -> float:
        """Transitions sent so far."""
        return self._sent.value * self._per_segment

    def set_rate(self, transitions_per_second: float) -> None:
        """Changes the rate at which the actors together send transitions."""
        self._rate.value = transitions_per_second / self._per_segment

    def fill(self, num_transitions: float) -> float:
        """Waits until so many are sent; returns transitions/s. Raises TimeoutError if none is sent for a minute."""
        self._wait_for(1)
        start, first = time.monotonic(), self.sent_transitions
        self._wait_for(num_transitions)
        return (self.sent_transitions - first) / (time.monotonic() - start)

    def _wait_for(self, num_transitions: float) -> None:
        last_sent, last_change = 0.0, time.monotonic()
        while (sent := self.sent_transitions) < num_transitions:
            now = time.monotonic()
            if sent > last_sent:
                last_sent, last_change = sent, now
            elif now > last_change + PATIENCE_SECONDS:
                raise TimeoutError(f"the server accepted {sent:.0f} of {num_transitions:.0f} transitions, then none")
            time.sleep(0.01)

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


class DrawFigures(NamedTuple):
    """The speed of the server, measured by a client."""

    batches_per_second: float
    latency_milliseconds: list[float]  # from request to arrival of a group of batches: median, 99th percentile, maximum


class DrawingClient:
    """Draws groups of `batches_at_once` batches, and sends new priorities for all transitions drawn."""

    def __init__(self, address: str, config: Config, batches_at_once: int, security: Security = NO_KEYS):
        """Joins the server, and waits until it has received all live segments and the first batches."""
        self._context = LinkContext.of(security)
        self._socket = sockets.connect("sampling", self._context, address)
        self._peer_id = new_peer_id()
        self._batches_at_once = batches_at_once
        rng = np.random.default_rng(0)
        self._priorities = rng.random(batches_at_once * BATCH_SIZE).astype(np.float32) + 1e-3
        self._asked_seconds: deque[float] = deque()
        hello = LearnerHello(self._peer_id, config.compatibility_key, 0, batches_at_once, BATCH_SIZE)
        until = time.monotonic() + PATIENCE_SECONDS
        while not isinstance(self._receive(), LearnerWelcome):
            sockets.send(self._socket, hello)
            self._socket.poll(200)
            assert time.monotonic() < until, f"no replay server answers at {address}"
        self._ask(GROUPS[batches_at_once], SEGMENTS_WINDOW)
        while not self.draw(0.5).batches_per_second:
            pass

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
                    self._ask(0, len(message.ring_slots))
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
        self._send(Goodbye())
        self._socket.close()
        self._context.term()

    def _receive(self) -> Any:
        """Returns the next message or None; the server's heartbeat is its echo of an empty `Credit`."""
        return sockets.receive(self._socket, (LearnerWelcome, StreamedSegments, IndexBatches, Credit))

    def _ask(self, groups: int, segments: int) -> None:
        self._asked_seconds.extend([time.monotonic()] * groups)
        self._send(Credit(segments, groups))

    def _answer(self, batches: IndexBatches) -> None:
        indices, generations = batches.indices.ravel(), batches.generations.ravel()
        self._send(PriorityUpdate(indices, generations, self._priorities))
        self._ask(1, 0)

    def _send(self, message: Any) -> None:
        while not sockets.send(self._socket, message):
            self._socket.poll(1, zmq.POLLOUT)
