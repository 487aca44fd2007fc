"""The learner's side of the sampling link: a thread that decodes what the replay server streams, in its order."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from typing import Any, NamedTuple

import numpy as np
import zmq

from apex_jax.errors import RunError, printable
from apex_jax.run_identity import RunIdentity
from apex_jax.segment_codec import CorruptSegment, decode_columns, decode_frames, max_streamed_bytes
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    Credit,
    Finish,
    Goodbye,
    IndexBatches,
    LearnerHello,
    LearnerWelcome,
    PriorityUpdate,
    Refusal,
    Rejoin,
    StreamedSegments,
)
from apex_jax.transport.monitor import ClientMonitor
from apex_jax.types import SegmentColumns, SegmentSpec

_log = logging.getLogger(__name__)

SEGMENTS_WINDOW = 256  # segments sent to the learner and not yet in its frame store
HELLO_SECONDS = 1.0  # between two attempts, and between two signs of life
SILENT_SECONDS = 20.0  # until a server is given up: the next connection costs it all that is live once more
REFUSED_SECONDS = 30.0  # that a learner waits for the place of another; that of a dead one is free after 10


class Segments(NamedTuple):
    """Decoded segments to be written to the frame store before anything that comes later is consumed."""

    slots: np.ndarray  # int32[N]
    frames: np.ndarray  # uint8|float32[N, L, *O]
    columns: SegmentColumns  # [N, L] each
    received: int  # segments whose credit is to be returned, those that proved corrupt included


class Item(NamedTuple):
    """What the learner consumes next; credit and priorities for an older `epoch` (connection) are void."""

    content: Segments | IndexBatches
    epoch: int
    is_known: np.ndarray | None = None  # bool[K * B], not drawn from a segment that was left out; None = all


class SamplingClient:
    """Keeps the learner supplied: decodes on its own thread, and carries credit and priorities back.

    The learner calls `next` for what comes, `consumed` when it is done with it, and `update_priorities`. A replay
    server that goes away is looked for until it is back; then the stream begins anew with its live segments. One that
    sends more than it was given credit for is not taken at its word: nothing here grows beyond that.
    """

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        spec: SegmentSpec,
        hello: LearnerHello,
        capacity_segments: int,
        groups: int,
        away_limit_seconds: float = 0.0,
        run: RunIdentity | None = None,
    ):
        """Connects. `capacity_segments`: of the frame store; `groups`: `IndexBatches` at hand or in work.

        `run`: that the learner is part of, or becomes part of when it is welcomed; None = of any.
        `away_limit_seconds`: after which a server that is away is a RunError, 0 = never.
        """
        self._away_limit_seconds = away_limit_seconds
        self._run_identity = run or RunIdentity()
        self.dropped: Counter[str] = Counter()
        self.losses = 0  # of a server that had welcomed this learner
        self._context = context
        self._address = address
        self._spec = spec
        self._hello = hello
        self._capacity_segments = capacity_segments
        self._groups = groups
        # An item takes a group or a segment of the credit at least; one place is for the error that ends it all.
        self._items: queue.Queue[Item | RunError] = queue.Queue(groups + SEGMENTS_WINDOW + 1)
        self._outbox: deque[tuple[int, Any]] = deque()  # (epoch it is meant for, message)
        self._epoch = 0
        self._welcomed = False
        self._lost_since: float | None = None
        self._groups_left = self._segments_left = 0  # of the credit that the server has been sent
        self._left_out: set[int] = set()  # slots whose newest segment is corrupt: the server draws from it, too
        self._has_failed = False
        self._last_word: Finish | None = None
        self._refused_since: float | None = None
        self._next_hello = 0.0
        self.is_finish_heard = threading.Event()  # by the replay server
        self._closing = threading.Event()
        self._wake = context.socket(zmq.PAIR)
        self._wake.bind(f"inproc://sampling-stream-{id(self)}")
        self._thread = threading.Thread(target=self._run, name="sampling stream")
        self._thread.start()

    def next(self, timeout_seconds: float) -> Item | None:
        """Returns what is to be consumed next, None if nothing comes in time. RunError if the server refused us."""
        until = time.monotonic() + timeout_seconds
        while True:
            left_seconds = until - time.monotonic()
            try:
                item = self._items.get(timeout=left_seconds) if left_seconds > 0 else self._items.get_nowait()
            except queue.Empty:
                return None
            if isinstance(item, Exception):
                raise item
            if item.epoch == self._epoch:  # else the segments that came before it may have been left out already
                return item

    def consumed(self, item: Item) -> None:
        """Gives the server credit for as much again."""
        segments = item.content.received if isinstance(item.content, Segments) else 0
        groups = 0 if isinstance(item.content, Segments) else 1
        self._post(item.epoch, Credit(run_id=self._hello.run_id, groups=groups, segments=segments))

    def update_priorities(self, item: Item, priorities: np.ndarray) -> None:
        """Sends the new priorities float32[K, B] of a consumed item of batches."""
        assert isinstance(item.content, IndexBatches)
        known: slice | np.ndarray = slice(None) if item.is_known is None else item.is_known
        update = PriorityUpdate(
            run_id=self._hello.run_id,
            indices=item.content.indices.ravel()[known],
            generations=item.content.generations.ravel()[known],
            priorities=priorities.ravel()[known],
        )
        self._post(item.epoch, update)

    def finish(self, reason: str) -> None:
        """Tells the replay server that the run is over, again and again until `is_finish_heard`."""
        self._last_word, self._next_hello = Finish(reason=reason), 0.0
        self._wake_up()

    @property
    def peer_state(self) -> str:
        """What has become of the replay server, as far as this end knows: joined, connecting, lost or refused."""
        if self._welcomed:
            return "joined"
        if self._lost_since is not None:
            return "lost"
        return "refused" if self._refused_since is not None else "connecting"

    def close(self) -> None:
        """Takes leave and ends the thread."""
        self._post(self._epoch, Goodbye(run_id=self._hello.run_id))
        self._closing.set()
        self._thread.join()
        self._wake.close()

    def _post(self, epoch: int, message: Any) -> None:
        self._outbox.append((epoch, message))
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(zmq.Again):  # so many wake-ups are under way that one more changes nothing
            self._wake.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        monitor = ClientMonitor(self._away_limit_seconds)
        draw_bytes = 4 * self._hello.batches_at_once * self._hello.batch_size
        largest = max(max_streamed_bytes(self._spec), draw_bytes)
        try:
            with (
                sockets.connect_sampling(self._context, self._address, monitor, largest) as socket,
                monitor,
                self._context.socket(zmq.PAIR) as wake,
            ):
                wake.connect(f"inproc://sampling-stream-{id(self)}")
                self._serve(socket, wake, monitor)
        except RunError as error:
            self._fail(error)
        except Exception as error:  # a learner that nobody supplies would wait for ever
            self._fail(RunError(f"the link to the replay server at {self._address} failed: {error}"))
            raise

    def _fail(self, error: RunError) -> None:
        """Ends the learner; a server that says so again and again changes nothing."""
        if not self._has_failed:
            self._has_failed = True
            self._items.put_nowait(error)

    def _serve(self, socket: zmq.Socket, wake: zmq.Socket, monitor: ClientMonitor) -> None:
        _log.info("joining the replay server at %s", self._address)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        while not self._closing.is_set():
            poller.poll(100)
            monitor.check()
            monitor.count(self.dropped)
            monitor.look_for_server(self.peer_state in ("connecting", "lost"))
            while wake.poll(0):
                wake.recv()
            self._sign_of_life(socket)
            self._flush(socket)
            self._receive(socket, monitor)
            monitor.give_up_silent(SILENT_SECONDS)
            self._look_for_server(monitor)
        self._flush(socket)

    def _look_for_server(self, monitor: ClientMonitor) -> None:
        """Notices that the connection is gone: closed, or given up."""
        if self._welcomed and not monitor.has_joined and not self.is_finish_heard.is_set():  # then it may go
            self._lose(f"the replay server at {self._address} is lost: looking for it")

    def _lose(self, text: str) -> None:
        self._welcomed, self._next_hello = False, 0.0
        self._lost_since = time.monotonic()
        self.losses += 1
        _log.warning("%s", text)

    def _sign_of_life(self, socket: zmq.Socket) -> None:
        now = time.monotonic()
        if now >= self._next_hello:
            self._next_hello = now + HELLO_SECONDS
            word = self._last_word or Credit(run_id=self._hello.run_id, groups=0, segments=0)  # both are answered
            sockets.send(socket, word if self._welcomed else self._hello)

    def _flush(self, socket: zmq.Socket) -> None:
        """Sends what waits; what the server cannot take now waits on, what is meant for an older connection is void."""
        while self._outbox:
            epoch, message = self._outbox[0]
            if epoch == self._epoch:
                if not (self._welcomed and sockets.send(socket, message)):
                    return
                if isinstance(message, Credit):
                    self._groups_left += message.groups
                    self._segments_left += message.segments
            self._outbox.popleft()

    def _receive(self, socket: zmq.Socket, monitor: ClientMonitor) -> None:
        expected = (LearnerWelcome, Refusal, Rejoin, StreamedSegments, IndexBatches, Finish, Credit)
        for message in sockets.receive_some(socket, expected, self.dropped):
            monitor.heard()
            if isinstance(message, StreamedSegments):
                self._take_segments(message)
            elif isinstance(message, IndexBatches):
                self._take_batches(message)
            elif isinstance(message, LearnerWelcome):
                monitor.check(at_once=True)  # this connection's beginning, which would else look like the loss of it
                self._on_welcome(socket, message)
            elif isinstance(message, Finish):
                if self._last_word is not None:  # else nobody has been told anything that could have been heard
                    self.is_finish_heard.set()
            elif isinstance(message, Rejoin):
                if self._welcomed:
                    self._lose("the replay server no longer knows this learner: rejoining")
            elif isinstance(message, Credit):
                pass  # the server's sign of life
            elif message.final:
                reason = self._run_identity.refused(message.reason)
                self._fail(RunError(f"refused by the replay server at {self._address}: {reason}"))
            else:
                self._on_full(printable(message.reason))

    def _on_full(self, reason: str) -> None:
        """Waits for a place, said once; a place that does not come free is that of a learner which lives."""
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
            _log.warning("%s: waiting up to %.0f s for its place", reason, REFUSED_SECONDS)
        elif now - self._refused_since > REFUSED_SECONDS:
            fix = "stop it, or give this one a replay server of its own (addresses.sampling)"
            self._fail(RunError(f"refused by the replay server at {self._address}: {reason}; {fix}"))

    def _on_welcome(self, socket: zmq.Socket, message: LearnerWelcome) -> None:
        self._refused_since = None
        if message.capacity_segments != self._capacity_segments:
            error = (
                f"the replay server holds {message.capacity_segments} segments, this learner {self._capacity_segments}"
            )
            self._fail(RunError(f"{error}: replay.capacity_transitions must be the same for both"))
            return
        self._run_identity.adopt(message.run_identity, f"the replay server at {self._address}")
        self._hello = self._hello._replace(run_identity=self._run_identity.name, is_new_run=False)
        if self._lost_since is not None:
            _log.info("the replay server is back after %.0f s", time.monotonic() - self._lost_since)
            self._lost_since = None
        self._epoch += 1
        self._welcomed = True
        self._forget_items()
        self._next_hello = 0.0  # a last word goes out at once
        self._give_credit(groups=self._groups, segments=SEGMENTS_WINDOW)
        self._flush(socket)

    def _forget_items(self) -> None:
        """Leaves out what came over the connection before: all that is live comes again, and credit starts anew."""
        self._groups_left = self._segments_left = 0
        with contextlib.suppress(queue.Empty):
            while not self._has_failed:
                self._items.get_nowait()

    def _give_credit(self, groups: int, segments: int) -> None:
        self._outbox.append((self._epoch, Credit(run_id=self._hello.run_id, groups=groups, segments=segments)))

    def _take_segments(self, message: StreamedSegments) -> None:
        lengths = message.body_bytes
        if len(lengths) > self._segments_left:
            self._on_excess()
            return
        self._segments_left -= len(lengths)
        if not len(lengths):  # of which a server of ours sends none: there is no credit to give back
            self.dropped["bad_segments"] += 1
            return
        out_of_ring = (message.slots < 0).any() or (message.slots >= self._capacity_segments).any()
        if out_of_ring or (lengths < 0).any() or lengths.sum(dtype=np.int64) != len(message.bodies):
            self.dropped["bad_segments"] += 1
            self._give_credit(groups=0, segments=len(lengths))
            return
        sound, frames, columns = self._decoded(message)
        self._left_out.difference_update(message.slots.tolist())
        if len(sound) < len(lengths):
            self._left_out.update(np.delete(message.slots, sound).tolist())
            _log.warning("%d segments from the replay server are corrupt: left out", len(lengths) - len(sound))
        if not sound:
            self._give_credit(groups=0, segments=len(lengths))
            return
        stacked = SegmentColumns(*(np.stack(column) for column in zip(*columns, strict=True)))
        self._items.put_nowait(Item(Segments(message.slots[sound], frames, stacked, len(lengths)), self._epoch))

    def _decoded(self, message: StreamedSegments) -> tuple[list[int], np.ndarray, list[SegmentColumns]]:
        """Returns which segments are sound, the frames of those `[N, L, *O]`, and the columns of each.

        Memory for frames is reserved for those alone whose columns are sound: a body that is no segment costs nothing.
        """
        ends = np.cumsum(message.body_bytes)
        starts = ends - message.body_bytes
        bodies = [memoryview(message.bodies)[start:end] for start, end in zip(starts, ends, strict=True)]
        columns: dict[int, SegmentColumns] = {}
        for i, body in enumerate(bodies):
            try:
                columns[i] = decode_columns(body, self._spec)
            except CorruptSegment as error:
                self.dropped[error.reason] += 1
        frames = np.empty((len(columns), self._spec.slots, *self._spec.frame_shape), self._spec.frame_dtype)
        sound: list[int] = []
        for i in columns:
            try:
                decode_frames(bodies[i], self._spec, out=frames[len(sound)])
                sound.append(i)
            except CorruptSegment as error:
                self.dropped[error.reason] += 1
        return sound, frames[: len(sound)], [columns[i] for i in sound]

    def _on_excess(self) -> None:
        """Refuses what no credit was given for: a server of ours sends none, and the frame store has a window."""
        self.dropped["beyond_credit"] += 1
        if self.dropped["beyond_credit"] == 1:
            _log.warning("the replay server at %s sends more than it was given credit for: refused", self._address)

    def _take_batches(self, message: IndexBatches) -> None:
        if not self._groups_left:
            self._on_excess()
            return
        self._groups_left -= 1
        shape = (self._hello.batches_at_once, self._hello.batch_size)
        limit = self._capacity_segments * self._spec.slots
        is_sound = (
            message.indices.shape == shape
            and 0 <= message.indices.min() <= message.indices.max() < limit
            and message.weights.min() >= 0
            and message.weights.max() <= 1  # no comparison with NaN is true
        )
        if not is_sound:
            self.dropped["bad_batches"] += 1
            self._give_credit(groups=1, segments=0)
            return
        # A server that restarts asks for it again.
        self._hello = self._hello._replace(environment_steps=message.environment_steps)
        self._items.put_nowait(self._weighed(message))

    def _weighed(self, message: IndexBatches) -> Item:
        """Returns batches in which what was drawn from a segment that was left out weighs nothing.

        The frame store has in its place what was there before, of which its new priority would tell.
        """
        if not self._left_out:
            return Item(message, self._epoch)
        is_known = ~np.isin(message.indices // self._spec.slots, list(self._left_out))
        weights = np.where(is_known, message.weights, np.float32(0))
        return Item(message._replace(weights=weights), self._epoch, is_known.ravel())
