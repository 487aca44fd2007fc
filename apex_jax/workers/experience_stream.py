"""The actor's side of the experience link: a thread that compresses and sends segments, and keeps them until stored."""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections import Counter, deque
from typing import NamedTuple

import numpy as np
import zmq

from apex_jax.errors import RunError
from apex_jax.transport import sockets
from apex_jax.transport.codec import CorruptSegment, encode_segment
from apex_jax.transport.monitor import ClientMonitor
from apex_jax.types import (
    ActorHello,
    ActorStatus,
    ActorWelcome,
    EpisodeStatistics,
    Finish,
    Goodbye,
    Refusal,
    Rejoin,
    Segment,
    SegmentAck,
    SegmentMessage,
    SegmentSpec,
)

_log = logging.getLogger(__name__)

HELLO_SECONDS = 1.0  # between two attempts, and between two signs of life


class Produced(NamedTuple):
    """A segment and the environment steps made since the one before."""

    segment: Segment
    environment_steps: int


class ExperienceStream:
    """Sends what an actor produces, never faster than the replay server takes it.

    At most `max_outstanding_segments` (the server's word) are sent and not acknowledged, and at most `queue_size` wait
    to be sent; then `put` waits. Whatever is not acknowledged is sent again to a server that has restarted.
    """

    def __init__(self, context: zmq.Context, address: str, spec: SegmentSpec, hello: ActorHello, queue_size: int):
        """Connects and says hello."""
        self.dropped: Counter[str] = Counter()
        self.status = ActorStatus(run_id=hello.run_id, steps_per_second=0.0, weights_version=0)
        self.finished = threading.Event()  # the run is over, or the server refused this actor: see `error`
        self.error: RunError | None = None
        self._context = context
        self._address = address
        self._spec = spec
        self._hello = hello
        self._produced: queue.Queue[Produced] = queue.Queue(queue_size)
        self._episodes: deque[EpisodeStatistics] = deque(maxlen=1024)
        self._unacknowledged: deque[SegmentMessage] = deque()
        self._num_sent = 0  # of those, from the oldest
        self._sequence = 0
        self._steps_unsent = 0  # environment steps that no segment has carried yet
        self._welcome: ActorWelcome | None = None
        self._is_welcome = threading.Event()
        self._next_hello = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="experience stream")
        self._thread.start()

    def wait_for_welcome(self, timeout_seconds: float) -> ActorWelcome | None:
        """Returns the server's welcome, None if it does not come in time."""
        self._is_welcome.wait(timeout_seconds)
        return self._welcome

    def put(self, segment: Segment, environment_steps: int, timeout_seconds: float) -> bool:
        """Takes a segment to send; returns False if there was no room for it in time."""
        try:
            self._produced.put(Produced(segment, environment_steps), timeout=timeout_seconds)
        except queue.Full:
            return False
        return True

    def put_episodes(self, epsilon: np.ndarray, episode_return: np.ndarray, steps: np.ndarray) -> None:
        """Takes the statistics of finished games, [N] each."""
        self._episodes.append(EpisodeStatistics(self._hello.run_id, epsilon, episode_return, steps))

    def close(self) -> None:
        """Takes leave and ends the thread; what is not yet sent is lost."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        monitor = ClientMonitor()
        try:
            with sockets.connect_experience(self._context, self._address, monitor) as socket, monitor:
                self._serve(socket, monitor)
        except RunError as error:
            self.error = error
            self.finished.set()
        except Exception as error:  # an actor whose segments nobody sends would wait for ever
            self.error = RunError(f"the link to the replay server at {self._address} failed: {error}")
            self.finished.set()
            raise

    def _serve(self, socket: zmq.Socket, monitor: ClientMonitor) -> None:
        while not self._closing.is_set():
            monitor.check()
            self._sign_of_life(socket)
            self._encode_next()
            self._flush(socket)
            # Between segments there is time; while they come in, none is lost waiting for messages.
            socket.poll(0 if self._has_room() and not self._produced.empty() else 20)
            self._receive(socket)
        sockets.send(socket, Goodbye(run_id=self._hello.run_id))

    def _sign_of_life(self, socket: zmq.Socket) -> None:
        now = time.monotonic()
        if now >= self._next_hello:
            self._next_hello = now + HELLO_SECONDS
            sockets.send(socket, self.status if self._is_welcome.is_set() else self._hello)

    def _has_room(self) -> bool:
        return self._welcome is not None and len(self._unacknowledged) < self._welcome.max_outstanding_segments

    def _encode_next(self) -> None:
        if not self._has_room():
            return
        try:
            segment, environment_steps = self._produced.get_nowait()
        except queue.Empty:
            return
        self._steps_unsent += environment_steps
        try:
            body = encode_segment(segment, self._spec)
        except CorruptSegment as error:  # weights that have become NaN make such priorities, until better ones come
            self.dropped[error.reason] += 1
            if self.dropped[error.reason] == 1:
                _log.warning("segments are left out: %s", error.reason)
            return
        self._sequence += 1
        message = SegmentMessage(self._hello.run_id, self._sequence, self._steps_unsent, zlib.crc32(body), body)
        self._steps_unsent = 0
        self._unacknowledged.append(message)

    def _flush(self, socket: zmq.Socket) -> None:
        if self._welcome is None or not self._is_welcome.is_set():
            return
        # A server that came back with another configuration may give less credit than there is to send again.
        sendable = min(len(self._unacknowledged), self._welcome.max_outstanding_segments)
        while self._num_sent < sendable and sockets.send(socket, self._unacknowledged[self._num_sent]):
            self._num_sent += 1
        while self._episodes and sockets.send(socket, self._episodes[0]):
            self._episodes.popleft()

    def _receive(self, socket: zmq.Socket) -> None:
        expected = (ActorWelcome, SegmentAck, Rejoin, Refusal, Finish)
        while (message := sockets.receive(socket, expected, self.dropped)) is not None:
            if isinstance(message, SegmentAck):
                while self._unacknowledged and self._unacknowledged[0].sequence <= message.sequence:
                    self._unacknowledged.popleft()
                    self._num_sent = max(0, self._num_sent - 1)
            elif isinstance(message, ActorWelcome):
                self._welcome = message
                self._num_sent = 0
                self._is_welcome.set()
            elif isinstance(message, Rejoin):
                if self._is_welcome.is_set():
                    _log.info("the replay server does not know this actor any more: joining again")
                    self._is_welcome.clear()
                    self._next_hello = 0.0
            elif isinstance(message, Finish):
                self.finished.set()
            elif message.final:
                self.error = RunError(f"refused by the replay server at {self._address}: {message.reason}")
                self.finished.set()
