"""The replay server's side of the experience link: membership, segments and flow control of the actors."""

from __future__ import annotations

import logging
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import zmq

from apex_jax.agent.exploration import choose_ladder_indices
from apex_jax.config import Config
from apex_jax.links.server import LinkServer
from apex_jax.process import digest_of_peer_id
from apex_jax.replay.replay import Replay
from apex_jax.run.identity import RunIdentity
from apex_jax.run.metrics import EPSILON_BANDS, NOISE_BANDS, TRAINING_INFO, TRAINING_TAG, Means
from apex_jax.segment_codec import CorruptSegment, decode_columns, value_limits
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
)
from apex_jax.types import PEER_TIMEOUT_SECONDS, Columns, SegmentRecord, SegmentSpec

_log = logging.getLogger(__name__)

# The actors, their indices on the exploration ladder, and the order of their segments. No sockets ---------------------


MAX_ACTOR_NUMBER = 2**32  # largest accepted from an actor; its successors must fit the protocol, too
QUIET_SECONDS = 3.0  # without a heartbeat, after which indices may be reassigned: a duplicate is better than a gap


class Waiting(NamedTuple):
    """A received segment that is pending until the rate limiter admits it."""

    segment: SegmentRecord
    columns: Columns | None
    refusal: str  # why it is not stored; empty if it is


@dataclass(eq=False)
class ActorPeer:
    """The server's record of an actor."""

    peer_id: int
    actor_number: int  # number among all actors of the run, from 1
    ladder_indices: np.ndarray  # int32[E], on the exploration ladder
    status: ActorStatus
    received: int  # every segment up to this sequence number was received
    connection: bytes
    seen_seconds: float = 0.0
    waiting: deque[Waiting] = field(default_factory=deque)
    acknowledged: int = 0  # newest sequence number acknowledged on this connection
    answered_seconds: float = 0.0  # time of the last acknowledgement

    @property
    def stored(self) -> int:
        """Every segment up to this sequence number is stored or refused."""
        return self.waiting[0].segment.sequence - 1 if self.waiting else self.received


class Membership:
    """The connected actors."""

    def __init__(self, ladder_size: int) -> None:
        self.actors: dict[bytes, ActorPeer] = {}  # by connection
        self._ladder_size = ladder_size
        self._turns: deque[ActorPeer] = deque()  # actors with pending segments

    def connection_of(self, peer_id: int) -> bytes | None:
        """Returns the connection of an actor, or None."""
        return next((connection_id for connection_id, actor in self.actors.items() if actor.peer_id == peer_id), None)

    def choose(self, hello: ActorHello, highest_actor_number: int, now_seconds: float) -> tuple[int, np.ndarray]:
        """Returns an actor's number and ladder indices: those of its hello if they are valid, else new ones.

        `highest_actor_number`: highest one assigned so far, by this server and those before it.
        """
        connection = self.connection_of(hello.peer_id)
        if connection is not None:
            return self.actors[connection].actor_number, self.actors[connection].ladder_indices
        # An assigned actor number may exceed MAX_ACTOR_NUMBER, after another actor has claimed the maximum.
        is_accepted = 1 <= hello.actor_number <= max(MAX_ACTOR_NUMBER, highest_actor_number)
        actor_number = hello.actor_number if is_accepted else highest_actor_number + 1
        ladder_indices = hello.ladder_indices
        on_ladder = not ladder_indices.size or 0 <= ladder_indices.min() <= ladder_indices.max() < self._ladder_size
        if not (is_accepted and on_ladder and ladder_indices.size == hello.num_environments):
            occupants = self._occupants_seen_since(now_seconds - QUIET_SECONDS)
            ladder_indices = choose_ladder_indices(occupants, hello.num_environments)
        return actor_number, ladder_indices

    def leave(self, connection_id: bytes, keeps_pending: bool = False) -> None:
        """Removes an actor, and discards its pending segments unless `keeps_pending`, as for one that has ended.

        An actor that reconnects still has these, since they were not acknowledged, and sends them again.
        """
        actor = self.actors.pop(connection_id)
        if actor.waiting and not keeps_pending:
            self._turns.remove(actor)

    def _occupants_seen_since(self, seconds: float) -> np.ndarray:
        """Returns the number of environments at each ladder index, without those of silent, probably dead actors."""
        occupants = np.zeros(self._ladder_size, np.int64)
        for actor in self.actors.values():
            if actor.seen_seconds >= seconds:
                np.add.at(occupants, actor.ladder_indices, 1)
        return occupants

    def enqueue(self, actor: ActorPeer, waiting: Waiting) -> None:
        """Adds a segment of a connected actor."""
        if not actor.waiting:
            self._turns.append(actor)
        actor.waiting.append(waiting)

    def next_waiting(self) -> Waiting | None:
        """Returns the segment to be stored next, or None. Actors take turns."""
        return self._turns[0].waiting[0] if self._turns else None

    def dequeue(self) -> ActorPeer:
        """Removes the segment that `next_waiting` returns, and ends the turn; returns the actor of the segment."""
        actor = self._turns.popleft()
        actor.waiting.popleft()
        if actor.waiting:
            self._turns.append(actor)
        return actor


# Mean returns and lengths of the games that actors finished, between two reports of the server ------------------------


class EpisodeMeans:
    """Means over the training games since the last report."""

    def __init__(self, config: Config, spec: SegmentSpec):
        self.means = Means()  # by tag
        self._bands = EPSILON_BANDS if spec.action.dtype == "int32" else NOISE_BANDS
        self._info_names = config.metrics.info

    def add(self, message: EpisodeStatistics) -> bool:
        """Adds the games of a message; adds none and returns False if any value is impossible.

        There is no Python loop over the games, since a message may hold thousands.
        """
        exploration, steps = message.exploration, message.episode_steps
        is_finite = np.isfinite(exploration).all() and np.isfinite(message.episode_return).all()
        if not (is_finite and ((exploration >= 0) & (exploration <= self._bands.largest) & (steps >= 0)).all()):
            return False  # one NaN would spoil the means of all actors
        self.means.add("charts/episodic_return", message.episode_return)
        self.means.add("charts/episodic_length", steps)
        for band, returns in self._bands.split(exploration, message.episode_return):
            self.means.add(f"{TRAINING_TAG}{band}", returns)
        for name, numbers in zip(message.info_names.split(), message.info.T, strict=False):
            if name in self._info_names:
                self.means.add(f"{TRAINING_INFO}{name}", numbers[np.isfinite(numbers)])
        return True


# The server -----------------------------------------------------------------------------------------------------------


ANSWER_SECONDS = 1.0  # an actor on a slow line may send only segments for long: answer them, too
MAX_ACTORS = 1024  # connected at once; each may have a full credit of pending segments


class ExperienceServer(LinkServer[ActorPeer]):
    """Receives and stores the segments of actors, which may connect and disconnect at any time.

    Flow control is by credit: an actor has at most `max_outstanding_segments` unacknowledged segments, which bounds the
    segments pending here for the rate limiter and puts backpressure on the actor. A segment is acknowledged after it
    has been stored, in order and exactly once, and written to the journal.
    """

    def __init__(
        self, socket: zmq.Socket, config: Config, spec: SegmentSpec, replay: Replay, run: RunIdentity | None = None
    ):
        """`run`: the run that its actors must be part of, None = any."""
        self.membership = Membership(config.ladder_size)
        self.actors = self.membership.actors  # the connected ones, by connection
        names, key = ("the replay server", "this actor"), config.compatibility_key
        super().__init__(names, socket, key, run, self.membership.actors, MAX_ACTORS)
        self.episodes = EpisodeMeans(config, spec)
        self._config = config
        self._spec = spec
        self._replay = replay
        self._limits = value_limits(config)
        self._unanswered: set[bytes] = set()  # connections of actors with stored segments to be acknowledged
        self._handlers = {
            ActorHello: self._on_hello,
            SegmentRecord: self._on_segment,
            EpisodeStatistics: self._on_episodes,
            ActorStatus: self._on_status,
            Goodbye: self._on_goodbye,
        }

    def store(self, now_seconds: float) -> None:
        """Stores pending segments while the rate limiter allows, writes them to the journal, then acknowledges them."""
        while (waiting := self.membership.next_waiting()) is not None:
            segment, columns, refusal = waiting
            if columns is None:
                self.dropped[refusal] += 1
                self._replay.refuse(segment, refusal)
            elif self._replay.can_insert(segment.transitions):
                self._replay.insert(segment, columns, now_seconds)
            else:
                break
            self._unanswered.add(self.membership.dequeue().connection)
        self._replay.journal.flush(now_seconds)
        for connection_id in list(self._unanswered):
            actor = self.actors.get(connection_id)
            if (
                actor is None
                or actor.stored == actor.acknowledged
                or self._acknowledge(connection_id, actor, now_seconds)
            ):
                self._unanswered.remove(connection_id)

    def finish(self, reason: str) -> None:
        """Sends every actor a `Finish`: the run is over."""
        for connection_id in self.actors:
            sockets.send(self._socket, Finish(reason=reason), connection_id)

    def _refusal(self, connection_id: bytes, hello: ActorHello) -> Refusal | None:
        if (refusal := super()._refusal(connection_id, hello)) is not None:
            return refusal
        if self.membership.connection_of(hello.peer_id) is None and len(self.actors) >= MAX_ACTORS:
            self.dropped["too_many_actors"] += 1
            reason = f"the replay server has the {MAX_ACTORS} actors it can have; use fewer, of more environments each"
            return Refusal(reason=reason, final=False)
        return None

    def _on_hello(self, connection_id: bytes, message: ActorHello, now_seconds: float) -> None:
        if connection_id in self.actors and self.actors[connection_id].peer_id == message.peer_id:
            return  # a repeated hello; a second welcome would cause all segments to be resent
        before = self.membership.connection_of(message.peer_id)
        ledger = self._replay.ledger
        actor_number, ladder_indices = self.membership.choose(message, ledger.highest_actor_number, now_seconds)
        welcome = ActorWelcome(
            actor_number=actor_number,
            ladder_indices=ladder_indices,
            ladder_size=self._config.ladder_size,
            max_outstanding_segments=self._config.actor.max_outstanding_segments,
            run_identity=self.run_identity.name,
        )
        if before is None:  # otherwise a restarted server might reuse the actor number
            self._replay.journal.on_welcome(message.peer_id, actor_number)
            self._replay.journal.flush(now_seconds)
        if not sockets.send(self._socket, welcome, connection_id):
            return  # this connection is dead, and the actor may have joined on another one
        self._join(connection_id, message, welcome, now_seconds)

    def _join(self, connection_id: bytes, message: ActorHello, welcome: ActorWelcome, now_seconds: float) -> None:
        """Makes the record of an actor. Its earlier one, if any, is removed: the actor resends what is not stored."""
        peer_id = message.peer_id
        for connection in (connection_id, self.membership.connection_of(peer_id)):  # one actor per connection
            if connection in self.actors:
                self.membership.leave(connection)
        # An actor of a server that has lost its journal has acknowledgements that this server does not know of.
        received = max(self._replay.ledger.sequence(peer_id), message.acknowledged)
        status = ActorStatus(steps_per_second=0.0, weights_version=0)
        number, indices = welcome.actor_number, welcome.ladder_indices
        actor = ActorPeer(peer_id, number, indices, status, received, connection_id, now_seconds)
        actor.answered_seconds = now_seconds
        self._replay.ledger.highest_actor_number = max(self._replay.ledger.highest_actor_number, number)
        self.actors[connection_id] = actor
        self._unanswered.add(connection_id)
        text = "actor %s joins with %d environments (%d actors)"
        _log.info(text, digest_of_peer_id(peer_id), len(actor.ladder_indices), len(self.actors))

    def _on_segment(self, connection_id: bytes, message: SegmentRecord, now_seconds: float) -> None:
        actor = self.actors[connection_id]
        if message.sequence <= actor.received:
            self.dropped["duplicate_segment"] += 1
        elif len(actor.waiting) >= self._config.actor.max_outstanding_segments:
            self.dropped["over_credit"] += 1  # apex_jax actors respect their credit
        elif message.sequence > actor.received + 1:
            # Messages arrive in order, so an earlier segment was corrupted; the actor must resend from there.
            self.dropped["early_segment"] += 1
            self.membership.leave(connection_id)
            sockets.send(self._socket, Rejoin(), connection_id)
            return
        else:
            self._take(actor, message)
        if now_seconds - actor.answered_seconds >= ANSWER_SECONDS:
            self._acknowledge(connection_id, actor, now_seconds)

    def _take(self, actor: ActorPeer, segment: SegmentRecord) -> None:
        actor.received = segment.sequence
        columns, refusal = None, ""
        if zlib.crc32(segment.body) != segment.crc:
            refusal = "bad_checksum"
        else:
            try:
                columns = decode_columns(segment.body, self._spec, self._limits)
                segment = segment._replace(transitions=int(np.count_nonzero(columns["priority"])))
            except CorruptSegment as error:
                refusal = error.reason
        self.membership.enqueue(actor, Waiting(segment._replace(peer_id=actor.peer_id), columns, refusal))

    def _acknowledge(self, connection_id: bytes, actor: ActorPeer, now_seconds: float) -> bool:
        if not sockets.send(self._socket, SegmentAck(sequence=actor.stored), connection_id):
            return False
        actor.acknowledged, actor.answered_seconds = actor.stored, now_seconds
        return True

    def _on_episodes(self, connection_id: bytes, message: EpisodeStatistics, now_seconds: float) -> None:
        if not self.episodes.add(message):
            self.dropped["bad_statistics"] += 1

    def _on_status(self, connection_id: bytes, message: ActorStatus, now_seconds: float) -> None:
        actor = self.actors[connection_id]
        actor.status = message
        self._replay.ledger.report(actor.peer_id, message.produced, is_late=message.acknowledged > 0)
        self._acknowledge(connection_id, actor, now_seconds)  # serves as the heartbeat to the actor

    def _on_goodbye(self, connection_id: bytes, message: Goodbye, now_seconds: float) -> None:
        actor = digest_of_peer_id(self.actors[connection_id].peer_id)
        self.membership.leave(connection_id, keeps_pending=True)
        _log.info("actor %s leaves (%d actors)", actor, len(self.actors))

    def _evict(self, connection_id: bytes) -> None:
        message = "actor %s has been silent for %.0f s: its places are free"
        _log.warning(message, digest_of_peer_id(self.actors[connection_id].peer_id), PEER_TIMEOUT_SECONDS)
        self.membership.leave(connection_id)
