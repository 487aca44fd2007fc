"""The actor's side of the experience link: a thread that encodes and sends segments, and keeps them until stored."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import zmq

from apex_jax.host.errors import RunError
from apex_jax.links.connection import Connection, LinkClient, LinkEnd, Patience
from apex_jax.segment_codec import CorruptSegment, encode_record
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    ActorWelcome,
    EpisodeStatistics,
    Finish,
    Goodbye,
    SegmentAck,
)
from apex_jax.types import PEER_TIMEOUT_SECONDS, Segment, SegmentRecord, SegmentSpec


class ExperienceClient(LinkClient):
    """Sends the segments of an actor, with backpressure from the replay server.

    At most `max_outstanding_segments` (set by the server) are unacknowledged, and at most `queue_size` more are queued;
    beyond that, `put` blocks or drops the oldest queued segments. Unacknowledged segments are sent again after every
    reconnection, so a restart of the server loses none.
    """

    def __init__(self, end: LinkEnd, spec: SegmentSpec, hello: ActorHello, queue_size: int, overflow: str = "wait"):
        """Connects. `overflow`: see `actor.overflow`. A RunError of the link becomes `error`."""
        super().__init__(Connection("replay server", end, Patience(PEER_TIMEOUT_SECONDS)))
        self.status = ActorStatus(steps_per_second=0.0, weights_version=0)
        self.produced = 0  # transitions of the actor so far; updated by the actor before each `put`
        self.acknowledged_segments = 0
        self.acknowledged = 0  # transitions in them
        self.finished = threading.Event()  # the run is over, or the link failed, see `error`
        self.error: RunError | None = None
        self._hello = hello
        self._drops = overflow == "drop"
        self._segments: queue.Queue[Segment] = queue.Queue(queue_size)
        self._outbox = Outbox(hello.peer_id, spec)
        self._welcome: ActorWelcome | None = None
        self._is_welcome = threading.Event()
        self._start(partial(sockets.connect, "experience", end.context, end.address), "experience client")

    def wait_for_welcome(self, timeout_seconds: float) -> ActorWelcome | None:
        """Returns the server's welcome, or None after the timeout."""
        self._is_welcome.wait(timeout_seconds)
        return self._welcome

    def put(self, segment: Segment, timeout_seconds: float) -> bool:
        """Queues a segment, or returns False if the queue is still full after the timeout.

        If `overflow` is "drop", drops the oldest queued segments instead and never blocks.
        """
        if self._drops:
            self._make_room()
            timeout_seconds = 0.0
        try:
            self._segments.put(segment, block=timeout_seconds > 0, timeout=timeout_seconds or None)
        except queue.Full:
            return False
        return True

    def put_episodes(self, episodes: EpisodeStatistics) -> None:
        """Queues the statistics of finished games."""
        self._outbox.episodes.append(episodes)

    def turn(self, now_seconds: float) -> None:
        """Encodes the next segment, sends pending messages, and handles those received."""
        self._connection.turn(now_seconds, self._newest_hello, self._full_status)
        self._encode_next()
        self._flush()
        self._receive(now_seconds)

    def _wait(self, socket: zmq.Socket) -> None:
        socket.poll(0 if self._has_room() and not self._segments.empty() else 20)

    def _fail(self, error: RunError) -> None:
        self.error = error
        self.finished.set()

    def _leave(self, socket: zmq.Socket) -> None:
        """Sends the final counts and a goodbye."""
        sockets.send(socket, self._full_status())
        sockets.send(socket, Goodbye())

    def _make_room(self) -> None:
        """Drops the oldest queued segments while the queue is full."""
        while self._segments.full():
            try:
                self._segments.get_nowait()
            except queue.Empty:  # sent meanwhile
                continue
            self._drop("overflow", "dropping segments: the replay server takes none, and the actor's queue is full")

    def _full_status(self) -> ActorStatus:
        return self.status._replace(acknowledged=self.acknowledged, produced=self.produced)

    def _newest_hello(self) -> ActorHello:
        acknowledged = self._outbox.acknowledged_sequence
        return self._hello._replace(acknowledged=acknowledged, run_identity=self._connection.run.name)

    def _has_room(self) -> bool:
        return self._welcome is not None and len(self._outbox) < self._welcome.max_outstanding_segments

    def _encode_next(self) -> None:
        if not self._has_room():
            return
        try:
            segment = self._segments.get_nowait()
        except queue.Empty:
            return
        try:
            self._outbox.add(segment, self.produced)
        except CorruptSegment as error:  # NaN weights lead to NaN priorities, until newer weights arrive
            self._drop(error.reason, f"skipping segments that cannot be encoded: {error.reason}")

    def _flush(self) -> None:
        if self._welcome is None:
            return
        # A server that restarted with another config may grant less credit than there are segments to resend.
        self._outbox.flush(self._welcome.max_outstanding_segments, self._connection.send)
        while self._outbox.episodes and self._connection.send(self._outbox.episodes[0]):
            self._outbox.episodes.popleft()

    def _receive(self, now_seconds: float) -> None:
        for message in self._connection.receive(now_seconds, (ActorWelcome, SegmentAck, Finish)):
            if isinstance(message, SegmentAck):
                self._on_acknowledged(message)
            elif isinstance(message, ActorWelcome):
                self._on_welcome(message, now_seconds)
            else:
                self._connection.server_may_end = True
                self.finished.set()

    def _on_acknowledged(self, message: SegmentAck) -> None:
        transitions = self._outbox.acknowledge(message.sequence)
        if transitions is None:
            raise self._connection.broken(f"acknowledged segment {message.sequence}, which it was never sent")
        self.acknowledged += transitions
        self.acknowledged_segments = self._outbox.acknowledged_sequence

    def _on_welcome(self, message: ActorWelcome, now_seconds: float) -> None:
        ladder_indices = message.ladder_indices
        if (
            len(ladder_indices) != self._hello.num_environments
            or not 0 <= ladder_indices.min() <= ladder_indices.max() < message.ladder_size
        ):
            raise self._connection.broken(
                f"gave {self._hello.num_environments} environments the places {ladder_indices}"
            )
        self._connection.join(now_seconds, message.run_identity)
        if self._welcome is None:  # the first welcome is binding for all later servers
            self._hello = self._hello._replace(actor_number=message.actor_number, ladder_indices=message.ladder_indices)
        else:
            number, indices = self._welcome.actor_number, self._welcome.ladder_indices
            message = message._replace(actor_number=number, ladder_indices=indices)
        self._welcome = message
        self._outbox.on_new_connection()
        self._is_welcome.set()


# An actor's outgoing segments: encoded, numbered, and kept until the replay server has stored them. No socket --------


MAX_EPISODES = 1024  # queued messages; the oldest are dropped


class Outbox:
    """The unacknowledged segments in order of their sequence numbers; the sent ones come first."""

    def __init__(self, peer_id: int, spec: SegmentSpec) -> None:
        self.episodes: deque[EpisodeStatistics] = deque(maxlen=MAX_EPISODES)  # sent once, not ordered with segments
        self._peer_id = peer_id
        self._spec = spec
        self._unacknowledged: deque[SegmentRecord] = deque()
        self._num_sent = 0  # segments sent on this connection, counted from the oldest
        self._sequence = 0  # sequence number of the newest segment
        self._highest_sent = 0  # highest sequence number sent on any connection

    def __len__(self) -> int:
        return len(self._unacknowledged)

    @property
    def acknowledged_sequence(self) -> int:
        """Every segment up to this sequence number is acknowledged and deleted."""
        return self._unacknowledged[0].sequence - 1 if self._unacknowledged else self._sequence

    def add(self, segment: Segment, produced: int) -> None:
        """Encodes a segment and assigns the next sequence number. Raises CorruptSegment.

        `produced`: transitions that the actor has produced so far.
        """
        record = encode_record(segment, self._spec, self._peer_id, self._sequence + 1, produced)
        self._sequence = record.sequence
        self._unacknowledged.append(record)

    def flush(self, credit: int, send: Callable[[SegmentRecord], bool]) -> None:
        """Sends what was not sent on this connection, oldest first, until `send` fails or `credit` are in flight."""
        while self._num_sent < min(len(self), credit) and send(self._unacknowledged[self._num_sent]):
            self._highest_sent = max(self._highest_sent, self._unacknowledged[self._num_sent].sequence)
            self._num_sent += 1

    def on_new_connection(self) -> None:
        """Marks every segment as unsent."""
        self._num_sent = 0

    def acknowledge(self, sequence: int) -> int | None:
        """Deletes the segments up to this number; returns their transitions, or None if it was never sent."""
        if sequence > self._highest_sent:
            return None
        transitions = 0
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            transitions += self._unacknowledged.popleft().transitions
            self._num_sent = max(0, self._num_sent - 1)
        return transitions
