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

from apex_jax.errors import RunError, printable
from apex_jax.run_identity import RunIdentity
from apex_jax.segment_codec import CorruptSegment, encode_segment
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    ActorWelcome,
    EpisodeStatistics,
    Finish,
    Goodbye,
    Refusal,
    Rejoin,
    SegmentAck,
    SegmentMessage,
)
from apex_jax.transport.monitor import ClientMonitor
from apex_jax.types import PEER_TIMEOUT_SECONDS, Segment, SegmentSpec

_log = logging.getLogger(__name__)

HELLO_SECONDS = 1.0  # between two attempts, and between two signs of life


class Produced(NamedTuple):
    """A segment and the environment steps made since the one before."""

    segment: Segment
    environment_steps: int


class ExperienceClient:
    """Sends what an actor produces, never faster than the replay server takes it.

    At most `max_outstanding_segments` (the server's word) are sent and not acknowledged, and at most `queue_size` wait
    to be sent; then `put` waits, or drops the oldest of them. Whatever is not acknowledged is sent again to a server
    that has restarted, for as long as it takes until there is one.
    """

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        spec: SegmentSpec,
        hello: ActorHello,
        queue_size: int,
        overflow: str = "wait",
        away_limit_seconds: float = 0.0,
        run: RunIdentity | None = None,
    ):
        """Connects and says hello. `overflow`: see `actor.overflow`; `run`: that the actor is part of, None = of any.

        `away_limit_seconds`: after which a server that is away is an `error`, 0 = never.
        """
        self._away_limit_seconds = away_limit_seconds
        self.dropped: Counter[str] = Counter()
        self.status = ActorStatus(run_id=hello.run_id, steps_per_second=0.0, weights_version=0)
        self.produced = 0  # transitions that its actor has made, as the actor says before it puts them
        self.silences = 0  # of a server that had welcomed this actor, longer than PEER_TIMEOUT_SECONDS
        self.finished = threading.Event()  # the run is over, or the server refused this actor: see `error`
        self.error: RunError | None = None
        self._context = context
        self._address = address
        self._spec = spec
        self._hello = hello
        self._run_identity = run or RunIdentity()
        self._drops = overflow == "drop"
        self._produced: queue.Queue[Produced] = queue.Queue(queue_size)
        self._account = Counter[str]()  # transitions, by the fields of `ActorStatus`; each has one thread that counts
        self._steps_dropped = 0  # environment steps of dropped segments, which the next one carries
        self._episodes: deque[EpisodeStatistics] = deque(maxlen=1024)
        self._unacknowledged: deque[SegmentMessage] = deque()
        self._num_sent = 0  # of those, from the oldest
        self._sequence = 0
        self._sequence_sent = 0  # the highest, to whatever server
        self._heard_seconds = 0.0
        self._is_silent = False
        self._steps_unsent = 0  # environment steps that no segment has carried yet
        self._welcome: ActorWelcome | None = None
        self._is_welcome = threading.Event()
        self._next_hello = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="experience stream")
        self._thread.start()

    @property
    def peer_state(self) -> str:
        """What has become of the replay server, as far as this end knows: joined, connecting, lost or refused."""
        if self.error is not None or (self._welcome is None and self.dropped["refused"]):
            return "refused"
        if self._is_silent:
            return "lost"
        return "joined" if self._is_welcome.is_set() else "connecting"

    def wait_for_welcome(self, timeout_seconds: float) -> ActorWelcome | None:
        """Returns the server's welcome, None if it does not come in time."""
        self._is_welcome.wait(timeout_seconds)
        return self._welcome

    def put(self, segment: Segment, environment_steps: int, timeout_seconds: float) -> bool:
        """Takes a segment to send; returns False if there was no room for it in time, and none was made."""
        item = Produced(segment, environment_steps)
        if self._drops:
            item = self._make_room(item)
            timeout_seconds = 0.0
        try:
            self._produced.put(item, block=timeout_seconds > 0, timeout=timeout_seconds or None)
        except queue.Full:
            return False
        return True

    def put_episodes(self, epsilon: np.ndarray, episode_return: np.ndarray, steps: np.ndarray) -> None:
        """Takes the statistics of finished games, [N] each."""
        self._episodes.append(EpisodeStatistics(self._hello.run_id, epsilon, episode_return, steps))

    def close(self) -> None:
        """Takes leave and ends the thread; of what was produced, the rest is told as unsent."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        monitor = ClientMonitor(self._away_limit_seconds)
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
            monitor.count(self.dropped)
            monitor.look_for_server(self.peer_state in ("connecting", "lost"))
            self._sign_of_life(socket)
            self._encode_next()
            self._flush(socket)
            # Between segments there is time; while they come in, none is lost waiting for messages.
            socket.poll(0 if self._has_room() and not self._produced.empty() else 20)
            self._receive(socket, monitor)
            monitor.give_up_silent(PEER_TIMEOUT_SECONDS)
        self._take_leave(socket)

    def _take_leave(self, socket: zmq.Socket) -> None:
        """Tells what is not going to come, and goes."""
        under_way = sum(message.transitions for message in list(self._unacknowledged)[: self._num_sent])
        self._account["unsent"] = self.produced - self._account.total() - under_way
        sockets.send(socket, self._full_status())
        sockets.send(socket, Goodbye(run_id=self._hello.run_id))

    def _make_room(self, item: Produced) -> Produced:
        """Drops the oldest segments that wait to be sent where there is no room; returns `item` with their steps."""
        while self._produced.full():
            try:
                segment, environment_steps = self._produced.get_nowait()
            except queue.Empty:  # sent meanwhile
                continue
            self._steps_dropped += environment_steps
            self._account["overflow"] += transitions_of(segment)
            self.dropped["overflow"] += 1
            if self.dropped["overflow"] == 1:
                _log.warning("dropping segments: the replay server takes none, and the actor's queue is full")
        item = item._replace(environment_steps=item.environment_steps + self._steps_dropped)
        self._steps_dropped = 0
        return item

    def _full_status(self) -> ActorStatus:
        # "produced" is read last: it may only be more than what has become of the rest.
        fates = {name: self._account[name] for name in ("acknowledged", "overflow", "unencodable", "unsent")}
        return self.status._replace(**fates, produced=self.produced)

    def _sign_of_life(self, socket: zmq.Socket) -> None:
        now = time.monotonic()
        if now >= self._next_hello:
            self._next_hello = now + HELLO_SECONDS
            is_welcome = self._is_welcome.is_set()
            sockets.send(socket, self._full_status() if is_welcome else self._newest_hello())
            silent_seconds = now - self._heard_seconds
            if self._welcome is not None and not self._is_silent and silent_seconds > PEER_TIMEOUT_SECONDS:
                self._is_silent = True
                self.silences += 1
                _log.warning(
                    "the replay server at %s has been silent for %.0f s: looking for it, keeping %d segments",
                    self._address,
                    silent_seconds,
                    len(self._unacknowledged),
                )

    def _newest_hello(self) -> ActorHello:
        acknowledged = self._acknowledged_sequence()
        return self._hello._replace(acknowledged=acknowledged, run_identity=self._run_identity.name)

    def _acknowledged_sequence(self) -> int:
        return self._unacknowledged[0].sequence - 1 if self._unacknowledged else self._sequence

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
            self._account["unencodable"] += transitions_of(segment)
            self.dropped[error.reason] += 1
            if self.dropped[error.reason] == 1:
                _log.warning("skipping segments that cannot be encoded: %s", error.reason)
            return
        self._sequence += 1
        crc, transitions = zlib.crc32(body), transitions_of(segment)
        steps = min(self._steps_unsent, self._spec.max_environment_steps(self._hello.num_environments))
        message = SegmentMessage(self._hello.run_id, self._sequence, steps, crc, body, transitions, self.produced)
        self._steps_unsent -= steps
        self._unacknowledged.append(message)

    def _flush(self, socket: zmq.Socket) -> None:
        if self._welcome is None or not self._is_welcome.is_set():
            return
        # A server that came back with another configuration may give less credit than there is to send again.
        sendable = min(len(self._unacknowledged), self._welcome.max_outstanding_segments)
        while self._num_sent < sendable and sockets.send(socket, self._unacknowledged[self._num_sent]):
            self._sequence_sent = max(self._sequence_sent, self._unacknowledged[self._num_sent].sequence)
            self._num_sent += 1
        while self._episodes and sockets.send(socket, self._episodes[0]):
            self._episodes.popleft()

    def _is_possible(self, welcome: ActorWelcome) -> bool:
        """Tells whether each environment has a place, and each place is on the ladder."""
        places = welcome.places
        return len(places) == self._hello.num_environments and 0 <= places.min() <= places.max() < welcome.ladder_size

    def _receive(self, socket: zmq.Socket, monitor: ClientMonitor) -> None:
        expected = (ActorWelcome, SegmentAck, Rejoin, Refusal, Finish)
        for message in sockets.receive_some(socket, expected, self.dropped):
            monitor.heard()
            self._heard()
            if isinstance(message, SegmentAck):
                self._on_acknowledged(message)
            elif isinstance(message, ActorWelcome):
                if self._is_possible(message):
                    self._on_welcome(message)
                else:
                    self.dropped["bad_welcome"] += 1
            elif isinstance(message, Rejoin):
                if self._is_welcome.is_set():
                    _log.info("the replay server no longer knows this actor: rejoining")
                    self._is_welcome.clear()
                    self._next_hello = 0.0
            elif isinstance(message, Finish):
                self.finished.set()
            elif message.final:
                reason = self._run_identity.refused(message.reason)
                self.error = RunError(f"refused by the replay server at {self._address}: {reason}")
                self.finished.set()
            else:
                self.dropped["refused"] += 1
                if self.dropped["refused"] == 1:
                    _log.warning("%s; retrying until it has a place", printable(message.reason))

    def _heard(self) -> None:
        if self._is_silent:
            _log.info("the replay server is back after %.0f s", time.monotonic() - self._heard_seconds)
            self._is_silent = False
        self._heard_seconds = time.monotonic()

    def _on_acknowledged(self, message: SegmentAck) -> None:
        if message.sequence > self._sequence_sent:  # nobody can have stored what was never sent
            self.dropped["bad_acknowledgement"] += 1
            return
        while self._unacknowledged and self._unacknowledged[0].sequence <= message.sequence:
            self._account["acknowledged"] += self._unacknowledged.popleft().transitions
            self._num_sent = max(0, self._num_sent - 1)

    def _on_welcome(self, message: ActorWelcome) -> None:
        self._run_identity.adopt(message.run_identity, f"the replay server at {self._address}")
        if self._welcome is None:  # which it acts with from now on, whatever servers come
            self._hello = self._hello._replace(incarnation=message.incarnation, places=message.places)
        elif not np.array_equal(message.places, self._welcome.places):
            _log.warning("the replay server has another epsilon ladder: this actor keeps the epsilons it began with")
            message = message._replace(places=self._welcome.places, incarnation=self._welcome.incarnation)
        self._welcome = message
        self._num_sent = 0
        self._is_welcome.set()


def transitions_of(segment: Segment) -> int:
    """Returns how many transitions start in a segment."""
    return int(np.count_nonzero(segment.columns.priority))
