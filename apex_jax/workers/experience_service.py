"""The replay server's side of the actors: who they are, what they send, and how far each may run ahead."""

from __future__ import annotations

import logging
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import zmq

from apex_jax.agent.exploration import choose_places
from apex_jax.config import Config
from apex_jax.metrics import Mean, epsilon_band
from apex_jax.replay.buffer import ReplayBuffer
from apex_jax.replay.rate_limiter import RateLimiter
from apex_jax.transport import sockets
from apex_jax.transport.codec import CorruptSegment, decode_columns
from apex_jax.types import (
    ActorHello,
    ActorStatus,
    ActorWelcome,
    EpisodeStatistics,
    Finish,
    Goodbye,
    Refusal,
    Rejoin,
    SegmentAck,
    SegmentColumns,
    SegmentMessage,
    SegmentSpec,
)

_log = logging.getLogger(__name__)

PEER_TIMEOUT_SECONDS = 10.0  # a peer that has said nothing for so long is dead: its place is free
MESSAGES_AT_ONCE = 256  # read before the other link gets its turn
REMEMBERED_RUNS = 4096  # actors' last sequence numbers, so that what is sent again after a gap is stored once


@dataclass
class Actor:
    """What the server knows of a connected actor."""

    run_id: int
    incarnation: int  # how many actors had come before, and this one
    places: np.ndarray  # int32[E], on the epsilon ladder
    seen_seconds: float
    status: ActorStatus
    waiting: deque[int] = field(default_factory=deque)  # sequence numbers of segments received and not yet stored
    acknowledged: int = 0  # newest sequence number it was told of, on this connection


class Waiting(NamedTuple):
    """A segment that has arrived and waits until the rate limiter lets it in."""

    actor: Actor
    body: bytes
    columns: SegmentColumns


@dataclass
class EpisodeMeans:
    """Returns of training games since the last report."""

    episode_return: Mean = field(default_factory=Mean)
    length: Mean = field(default_factory=Mean)
    by_band: dict[str, Mean] = field(default_factory=dict)


class ExperienceService:
    """Takes segments from any number of actors that come and go.

    Flow control is by credit: an actor has at most `max_outstanding_segments` segments that no `SegmentAck` covers, so
    what waits here for the rate limiter is bounded, and an actor that is held back waits instead of growing.
    """

    def __init__(
        self, socket: zmq.Socket, config: Config, spec: SegmentSpec, buffer: ReplayBuffer, limiter: RateLimiter
    ):
        self.actors: dict[bytes, Actor] = {}
        self.dropped: Counter[str] = Counter()
        self.environment_steps = 0  # of all actors, since the run began
        self.episodes = EpisodeMeans()
        self._socket = socket
        self._config = config
        self._spec = spec
        self._buffer = buffer
        self._limiter = limiter
        self._occupants = np.zeros(config.ladder_size, np.int64)
        self._welcomed = 0
        self._waiting: deque[Waiting] = deque()
        self._last_sequence: OrderedDict[int, int] = OrderedDict()  # by run id: the newest received
        self._handlers: dict[type, Callable[[bytes, Any, float], None]] = {
            ActorHello: self._on_hello,
            SegmentMessage: self._on_segment,
            EpisodeStatistics: self._on_episodes,
            ActorStatus: self._on_status,
            Goodbye: self._on_goodbye,
        }

    def read(self, now_seconds: float) -> None:
        """Takes the messages that have arrived."""
        for _ in range(MESSAGES_AT_ONCE):
            received = sockets.receive_from(self._socket, tuple(self._handlers), self.dropped)
            if received is None:
                return
            identity, message = received
            actor = self.actors.get(identity)
            if actor is None and not isinstance(message, ActorHello):
                sockets.send(self._socket, Rejoin(), identity)
                continue
            if actor is not None:
                actor.seen_seconds = now_seconds
            self._handlers[type(message)](identity, message, now_seconds)

    def store(self, now_seconds: float) -> None:
        """Stores waiting segments as far as the rate limiter allows, and acknowledges them."""
        while self._waiting:
            actor, body, columns = self._waiting[0]
            num_transitions = int(np.count_nonzero(columns.priority))
            if not self._limiter.can_insert(num_transitions, self._buffer.size_transitions):
                break
            self._waiting.popleft()
            self._buffer.insert(body, columns, now_seconds)
            self._limiter.insert(num_transitions)
            actor.waiting.popleft()
        for identity, actor in self.actors.items():
            stored = actor.waiting[0] - 1 if actor.waiting else self._last_sequence.get(actor.run_id, 0)
            if stored > actor.acknowledged and sockets.send(self._socket, SegmentAck(sequence=stored), identity):
                actor.acknowledged = stored

    def forget_the_dead(self, now_seconds: float) -> None:
        """Frees the places of actors that have been silent for too long."""
        for identity, actor in list(self.actors.items()):
            if now_seconds - actor.seen_seconds > PEER_TIMEOUT_SECONDS:
                _log.warning("actor %s is silent for %.0f s: its places are free", identity.hex(), PEER_TIMEOUT_SECONDS)
                self._remove(identity)

    def finish(self, reason: str) -> None:
        """Tells every actor that the run is over."""
        for identity in self.actors:
            sockets.send(self._socket, Finish(reason=reason), identity)

    @property
    def waiting_segments(self) -> int:
        """Segments that the rate limiter holds back."""
        return len(self._waiting)

    def _on_hello(self, identity: bytes, message: ActorHello, now_seconds: float) -> None:
        if message.agreement != self._config.agreement:
            reason = (
                f"the replay server runs [{self._config.agreement}], this actor [{message.agreement}]; use one config"
            )
            self.dropped["another_config"] += 1
            sockets.send(self._socket, Refusal(reason=reason, final=True), identity)
            return
        if identity in self.actors and self.actors[identity].run_id == message.run_id:
            return  # said again before the welcome had arrived: a second one would have everything sent twice
        actor = self._returning(message.run_id) or self._newcomer(message)
        if identity in self.actors:
            self._remove(identity)  # one connection is one actor, whatever it says
        actor.seen_seconds = now_seconds
        actor.acknowledged = 0  # what it was told before may not have arrived
        self.actors[identity] = actor
        welcome = ActorWelcome(
            incarnation=actor.incarnation,
            places=actor.places,
            ladder_size=self._config.ladder_size,
            max_outstanding_segments=self._config.actor.max_outstanding_segments,
        )
        if not sockets.send(self._socket, welcome, identity):
            self._remove(identity)
            return
        _log.info(
            "actor %s joins with %d environments (%d actors)", identity.hex(), len(actor.places), len(self.actors)
        )

    def _returning(self, run_id: int) -> Actor | None:
        """Takes an actor that reconnected (ZMQ then gives it another identity) out of the list, with its places."""
        for identity, actor in self.actors.items():
            if actor.run_id == run_id:
                return self.actors.pop(identity)
        return None

    def _newcomer(self, message: ActorHello) -> Actor:
        places = choose_places(self._occupants, message.num_environments)
        np.add.at(self._occupants, places, 1)
        self._welcomed += 1
        status = ActorStatus(run_id=message.run_id, steps_per_second=0.0, weights_version=0)
        # Held for dead with segments still waiting here: they count against its credit as before.
        unstored = (waiting.actor.waiting for waiting in self._waiting if waiting.actor.run_id == message.run_id)
        return Actor(message.run_id, self._welcomed, places, 0.0, status, waiting=next(unstored, deque()))

    def _on_segment(self, identity: bytes, message: SegmentMessage, now_seconds: float) -> None:
        actor = self.actors[identity]
        if message.sequence <= self._last_sequence.get(actor.run_id, 0):
            self.dropped["duplicate_segment"] += 1
            return
        if len(actor.waiting) >= self._config.actor.max_outstanding_segments:
            self.dropped["over_credit"] += 1  # not a sender of ours: they count
            return
        self._remember(actor.run_id, message.sequence)
        self.environment_steps += message.environment_steps
        if (columns := self._columns(message)) is not None:
            actor.waiting.append(message.sequence)
            self._waiting.append(Waiting(actor, message.body, columns))

    def _columns(self, message: SegmentMessage) -> SegmentColumns | None:
        if zlib.crc32(message.body) != message.crc:
            self.dropped["bad_checksum"] += 1
            return None
        try:
            return decode_columns(message.body, self._spec)
        except CorruptSegment as error:
            self.dropped[error.reason] += 1
            return None

    def _remember(self, run_id: int, sequence: int) -> None:
        self._last_sequence[run_id] = sequence
        self._last_sequence.move_to_end(run_id)
        if len(self._last_sequence) > REMEMBERED_RUNS:
            self._last_sequence.popitem(last=False)

    def _on_episodes(self, identity: bytes, message: EpisodeStatistics, now_seconds: float) -> None:
        if not (np.isfinite(message.epsilon).all() and np.isfinite(message.episode_return).all()):
            self.dropped["bad_statistics"] += 1  # one NaN would hide the games of all actors
            return
        self.episodes.episode_return.add(message.episode_return)
        self.episodes.length.add(message.episode_steps)
        for epsilon, episode_return in zip(message.epsilon, message.episode_return, strict=True):
            self.episodes.by_band.setdefault(epsilon_band(float(epsilon)), Mean()).add(episode_return)

    def _on_status(self, identity: bytes, message: ActorStatus, now_seconds: float) -> None:
        self.actors[identity].status = message

    def _on_goodbye(self, identity: bytes, message: Goodbye, now_seconds: float) -> None:
        self._remove(identity)
        _log.info("actor %s leaves (%d actors)", identity.hex(), len(self.actors))

    def _remove(self, identity: bytes) -> None:
        np.subtract.at(self._occupants, self.actors.pop(identity).places, 1)
