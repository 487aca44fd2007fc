"""The replay server's side of the experience link: membership, segments and flow control of the actors."""

from __future__ import annotations

import logging
import zlib

import numpy as np
import zmq

from apex_jax.config import Config
from apex_jax.links.episode_means import EpisodeMeans
from apex_jax.links.membership import ActorPeer, Membership, Waiting
from apex_jax.links.server import LinkServer
from apex_jax.process import digest_of_peer_id
from apex_jax.replay.replay import Replay
from apex_jax.run.identity import RunIdentity
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
from apex_jax.types import PEER_TIMEOUT_SECONDS, SegmentRecord, SegmentSpec

_log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0  # an actor on a slow line may send only segments for long: answer them, too
MAX_ACTORS = 1024  # connected at once; each may have a full credit of pending segments


class ExperienceServer(LinkServer[ActorPeer]):
    """Receives and stores the segments of actors, which may connect and disconnect at any time.

    Flow control is by credit: an actor has at most `max_outstanding_segments` unacknowledged segments, which bounds the
    segments pending here for the rate limiter and puts backpressure on the actor. A segment is acknowledged after it
    has been stored, in order and exactly once, and written to the journal.
    """

    def __init__(
        self,
        socket: zmq.Socket,
        config: Config,
        spec: SegmentSpec,
        replay: Replay,
        run: RunIdentity | None = None,
    ):
        """`run`: the run that its actors must be part of, None = any."""
        self.membership = Membership(config.ladder_size)
        self.actors = self.membership.actors  # the connected ones, by connection
        names, key = ("the replay server", "this actor"), config.compatibility_key
        super().__init__(names, socket, key, run, self.membership.actors, MAX_ACTORS)
        self.episodes = EpisodeMeans.of_run(config, spec)
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
                self._remove(connection)
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
            self._remove(connection_id)
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
        self._remove(connection_id, keeps_pending=True)
        _log.info("actor %s leaves (%d actors)", actor, len(self.actors))

    def _evict(self, connection_id: bytes) -> None:
        message = "actor %s has been silent for %.0f s: its places are free"
        _log.warning(message, digest_of_peer_id(self.actors[connection_id].peer_id), PEER_TIMEOUT_SECONDS)
        self._remove(connection_id)

    def _remove(self, connection_id: bytes, keeps_pending: bool = False) -> None:
        self.membership.leave(connection_id, keeps_pending)
