"""The learner's side of the sampling link: a thread that decodes the replay server's stream, in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import zmq

from apex_jax.host.errors import RunError
from apex_jax.links.connection import Connection, LinkClient, LinkEnd, Patience
from apex_jax.replay.importance_weights import MIN_PROBABILITY, importance_weights
from apex_jax.segment_codec import NO_LIMITS, ValueLimits, decode_segments, max_streamed_bytes
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    CorruptSegments,
    Credit,
    Finish,
    Goodbye,
    IndexBatches,
    LearnerHello,
    LearnerWelcome,
    PriorityUpdate,
    StreamedSegments,
)
from apex_jax.types import Columns, Observation, SegmentSpec

_log = logging.getLogger(__name__)

SEGMENTS_WINDOW = 256  # segments sent to the learner and not yet in its frame store
SILENT_SECONDS = 20.0  # until the server counts as lost; a reconnection resends all live segments
ROUNDING = 1e-9  # of a probability of 1
REFUSED_SECONDS = 30.0  # retry limit while another learner is connected; a dead one is evicted after 10


class Segments(NamedTuple):
    """Decoded segments, to be written to the frame store before later items are consumed."""

    ring_slots: np.ndarray  # int32[N]
    frames: Observation  # [N, L, *O]
    columns: Columns  # [N, L, ...] each


class Batches(NamedTuple):
    """K batches of B transitions."""

    indices: np.ndarray  # int32[K, B], ring slot x L + frame slot
    weights: np.ndarray  # float32[K, B], importance weights; the largest of each batch is 1
    drawn: IndexBatches  # as the server sent them


class Received(NamedTuple):
    """Content for the learner to consume; credit and priorities for an older `epoch` (connection) are discarded."""

    content: Segments | Batches
    epoch: int


def batches_of(drawn: IndexBatches, number: int, beta: float) -> Batches:
    """Returns a draw as `number` batches with their importance weights; `beta`: the exponent of these."""
    indices, probabilities = (array.reshape(number, -1) for array in (drawn.indices, drawn.probabilities))
    return Batches(indices, importance_weights(probabilities, beta), drawn)


class SamplingClient(LinkClient):
    """Receives and decodes segments and batches on its own thread, and sends credit and priorities back.

    `next` returns an item, `consumed` returns its credit, with which the server sends more. When the server is lost,
    the client reconnects until it is back; the stream then restarts with the live segments, and with new credit, which
    bounds the pending items.
    """

    def __init__(
        self,
        end: LinkEnd,
        spec: SegmentSpec,
        hello: LearnerHello,
        capacity_segments: int,
        draws: int,
        beta: float,
        limits: ValueLimits = NO_LIMITS,
    ):
        """Connects. `capacity_segments`: of the server; `draws`: largest number of `Batches` that are not consumed.

        `beta`: exponent of the importance weights; `limits`: of the values in a segment, which is corrupt beyond them.
        """
        super().__init__(Connection("replay server", end, Patience(SILENT_SECONDS, REFUSED_SECONDS)))
        self._spec, self._limits = spec, limits
        self._hello = hello
        self.environment_steps = hello.environment_steps  # of the whole run; updated by the learner
        self._capacity_segments = capacity_segments
        self._draws = draws
        self._beta = beta
        self._items: deque[Received] = deque()
        self._most_items = draws + SEGMENTS_WINDOW  # each uses some credit
        self._error: RunError | None = None
        self._outbox: deque[tuple[int, Any]] = deque()  # (epoch to which it belongs, message)
        self._epoch = 0  # number of the connection, from 1
        self._arrived = threading.Event()  # an item, or the end of the link
        self._has_reported = False  # whether corrupt segments were logged
        self._last_word: Finish | None = None
        self.is_finish_received = threading.Event()  # the replay server has acknowledged `finish`
        self._wake = sockets.WakeUp(end.context)
        largest = max(max_streamed_bytes(spec), 8 * hello.batches_at_once * hello.batch_size)
        _log.info("joining %s", self.name)
        connect = partial(sockets.connect, "sampling", end.context, end.address, max_message_bytes=largest)
        self._start(connect, "sampling client")

    def next(self, timeout_seconds: float) -> Received | None:
        """Returns the next item to consume, None after the timeout. Raises RunError once the link has failed."""
        self._arrived.clear()
        if (item := self._take()) is None and timeout_seconds > 0:
            self._arrived.wait(timeout_seconds)
            item = self._take()
        return item

    def _take(self) -> Received | None:
        if self._error is not None:
            raise self._error
        try:
            item = self._items.popleft()
        except IndexError:
            return None
        return item if item.epoch == self._epoch else None  # else, segments before it may have been discarded

    def consumed(self, item: Received) -> None:
        """Returns the credit of a processed item to the server."""
        content = item.content
        credit = Credit(draws=1) if isinstance(content, Batches) else Credit(len(content.ring_slots))
        self._post(item.epoch, credit._replace(environment_steps=self.environment_steps))

    def update_priorities(self, item: Received, priorities: np.ndarray) -> None:
        """Sends the new priorities, float32[K, B], of the transitions of an item."""
        assert isinstance(item.content, Batches)
        drawn = item.content.drawn
        self._post(item.epoch, PriorityUpdate(drawn.indices, drawn.generations, priorities.ravel()))

    def finish(self, reason: str) -> None:
        """Sends the replay server a `Finish`, repeatedly until `is_finish_received`."""
        self._last_word = Finish(reason=reason)
        self._connection.send_heartbeat()
        self._wake.wake_up()

    def close(self) -> None:
        """Sends a goodbye and ends the thread."""
        self._post(self._epoch, Goodbye())
        super().close()
        self._wake.close()

    def turn(self, now_seconds: float) -> None:
        """Sends the outbox and handles the messages received."""
        self._connection.turn(now_seconds, self._current_hello, self._heartbeat)
        self._flush()
        self._receive(now_seconds)

    def _post(self, epoch: int, message: Any) -> None:
        self._outbox.append((epoch, message))
        self._wake.wake_up()

    def _wait(self, socket: zmq.Socket) -> None:
        zmq.select([socket, self._wake.socket], [], [], timeout=0.1)
        self._wake.clear()

    def _leave(self, socket: zmq.Socket) -> None:
        self._flush()

    def _fail(self, error: RunError) -> None:
        self._error = error
        self._arrived.set()

    def _current_hello(self) -> LearnerHello:
        hello, run = self._hello._replace(environment_steps=self.environment_steps), self._connection.run.name
        return hello._replace(run_identity=run, is_new_run=False) if run else hello

    def _heartbeat(self) -> Finish | Credit:
        return self._last_word or Credit(0, environment_steps=self.environment_steps)

    def _flush(self) -> None:
        """Sends the outbox until the server can take no more; discards messages for older connections."""
        while self._outbox:
            epoch, message = self._outbox[0]
            if epoch == self._epoch and not self._connection.send(message):
                return
            self._outbox.popleft()

    def _receive(self, now_seconds: float) -> None:
        expected = (LearnerWelcome, StreamedSegments, IndexBatches, Finish, Credit)
        for message in self._connection.receive(now_seconds, expected):
            if isinstance(message, LearnerWelcome):
                self._on_welcome(message, now_seconds)
            elif isinstance(message, StreamedSegments | IndexBatches) and self._connection.state != "joined":
                continue  # sent before the next welcome, with which the stream begins anew
            elif isinstance(message, StreamedSegments):
                self._on_segments(message)
            elif isinstance(message, IndexBatches):
                self._on_batches(message)
            elif isinstance(message, Finish) and self._last_word is not None:  # answers our Finish
                self.is_finish_received.set()
                self._connection.server_may_end = True

    def _on_welcome(self, message: LearnerWelcome, now_seconds: float) -> None:
        if self._connection.state == "joined":  # the server would also receive the credit sent for its first welcome
            self._connection.start_over(now_seconds)
            return
        if message.capacity_segments != self._capacity_segments:
            error = f"{self._connection.name} holds {message.capacity_segments} segments, this learner"
            raise RunError(f"{error} {self._capacity_segments}: give both the same replay.capacity_transitions")
        self._connection.join(now_seconds, message.run_identity)
        self._epoch += 1
        self._items.clear()  # those of earlier connections: all live segments are sent again, and credit starts anew
        self._connection.send_heartbeat()  # a pending Finish is sent at once
        credit = Credit(SEGMENTS_WINDOW, self._draws, self.environment_steps)
        self._outbox.append((self._epoch, credit))
        self._flush()

    def _put(self, content: Segments | Batches) -> None:
        if len(self._items) == self._most_items:
            raise self._connection.broken("sends more than it was given credit for")
        self._items.append(Received(content, self._epoch))
        self._arrived.set()

    def _on_segments(self, message: StreamedSegments) -> None:
        lengths = message.body_bytes
        out_of_ring = (message.ring_slots < 0).any() or (message.ring_slots >= self._capacity_segments).any()
        if not len(lengths) or out_of_ring or (lengths < 0).any() or lengths.sum(dtype=np.int64) != len(message.bodies):
            raise self._connection.broken("streams segments that do not fit the replay")
        ends = np.cumsum(lengths)
        bodies = [memoryview(message.bodies)[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        frames, columns, corrupt = decode_segments(bodies, self._spec, self._limits)
        if corrupt:
            self.dropped.update(corrupt.values())
            self._report(message, list(corrupt))
        self._put(Segments(message.ring_slots, frames, columns))

    def _report(self, message: StreamedSegments, corrupt: list[int]) -> None:
        """Reports corrupt segments to the server, which never decodes frames, so that it stops drawing from them.

        Until then, the few batches in flight read blank frames for these segments.
        """
        if not self._has_reported:
            self._has_reported = True
            _log.warning("segments from the replay server are corrupt: reported to it (logged once, counted)")
        report = CorruptSegments(message.ring_slots[corrupt], message.generations[corrupt])
        self._outbox.append((self._epoch, report))

    def _on_batches(self, message: IndexBatches) -> None:
        limit, batches = self._capacity_segments * self._spec.slots, self._hello.batches_at_once
        if not (
            message.indices.size == batches * self._hello.batch_size
            and 0 <= message.indices.min() <= message.indices.max() < limit
            and message.probabilities.min() >= MIN_PROBABILITY  # False for NaN
            and message.probabilities.max() <= 1 + ROUNDING
        ):
            raise self._connection.broken("sends batches that do not fit the replay")
        self._put(batches_of(message, batches, self._beta))
