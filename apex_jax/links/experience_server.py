"""The replay server's side of the actors: who they are, what they send, and how far each may run ahead."""

from __future__ import annotations

import logging
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import zmq

from apex_jax.agent.exploration import choose_places
from apex_jax.agreement import told
from apex_jax.config import Config
from apex_jax.links.episode_means import EpisodeMeans
from apex_jax.links.limited_log import LimitedLog
from apex_jax.replay.ledger import ActorCounts
from apex_jax.replay.replay import Replay
from apex_jax.run_identity import RunIdentity
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
    SegmentMessage,
)
from apex_jax.types import PEER_TIMEOUT_SECONDS, Columns, SegmentRecord, SegmentSpec

_log = logging.getLogger(__name__)

MAX_INCARNATION = 2**32  # that an actor is believed: what comes after it must be a number of the protocol, too
ANSWER_SECONDS = 1.0  # a line that is slow may bring nothing but segments for long: also they are answered
QUIET_SECONDS = 3.0  # an actor speaks every second: the place of one that does not is better given twice than lost
MAX_ACTORS = 1024  # connected at once: each may have its credit of segments wait here
EARLY_BYTES = 2**26  # of segments that came before an earlier one, held for all actors together
GONE_ACTORS = 64  # so many credits of segments may wait here of actors that are not connected


@dataclass
class Actor:
    """What the server knows of a connected actor."""

    run_id: int
    incarnation: int  # how many actors had come before, and this one
    places: np.ndarray  # int32[E], on the ladder of exploration
    seen_seconds: float
    status: ActorStatus
    received: int = 0  # every segment up to this sequence number has arrived
    waiting: deque[int] = field(default_factory=deque)  # sequence numbers of those that have yet to be stored
    early: dict[int, SegmentMessage] = field(default_factory=dict)  # by sequence number: one before is missing
    acknowledged: int = 0  # newest sequence number it was told of, on this connection, ...
    answered_seconds: float = 0.0  # ... and when
    written: int = 0  # up to this sequence number were its segments stored when its counts were last written down


class Waiting(NamedTuple):
    """A segment that has arrived and waits until the rate limiter lets it in."""

    actor: Actor
    segment: SegmentRecord
    columns: Columns | None
    refusal: str  # why it is not to be stored; empty where it is


class ExperienceServer:
    """Takes segments from any number of actors that come and go.

    Flow control is by credit: an actor has at most `max_outstanding_segments` segments that no `SegmentAck` covers, so
    what waits here for the rate limiter is bounded, and an actor that is held back waits instead of growing. What is
    acknowledged has been stored, in order and once, and written to the journal.
    """

    def __init__(
        self,
        socket: zmq.Socket,
        config: Config,
        spec: SegmentSpec,
        replay: Replay,
        run: RunIdentity | None = None,
    ):
        """`run`: that its actors must be of, None = of any."""
        self.actors: dict[bytes, Actor] = {}
        self.dropped: Counter[str] = Counter()
        self.episodes = EpisodeMeans()
        self._socket = socket
        self._config = config
        self._spec = spec
        self._replay = replay
        self._limits = value_limits(config)
        self._run_identity = run or RunIdentity()
        self._occupants = np.zeros(config.ladder_size, np.int64)
        self._waiting: deque[Waiting] = deque()
        self._unread_after = 0  # messages read since the socket was last found empty
        self._early_bytes = 0  # of the bodies of early segments, over all connections
        self._log_lines = LimitedLog(_log)
        self._gone: dict[int, Actor] = {}  # by run id, the one that left first at the beginning: with segments waiting
        self._handlers: dict[type, Callable[[bytes, Any, float], None]] = {
            ActorHello: self._on_hello,
            SegmentMessage: self._on_segment,
            EpisodeStatistics: self._on_episodes,
            ActorStatus: self._on_status,
            Goodbye: self._on_goodbye,
        }

    def read(self, now_seconds: float) -> None:
        """Takes the messages that have arrived, as far as the budget of a turn goes."""
        for _ in sockets.reading_turn():
            received = sockets.receive_from(self._socket, tuple(self._handlers), self.dropped)
            if received is None:
                self._unread_after = 0
                return
            self._unread_after += 1
            identity, message = received
            actor = self.actors.get(identity)
            if actor is not None:
                actor.seen_seconds = now_seconds
            elif not isinstance(message, ActorHello):
                sockets.send(self._socket, Rejoin(), identity)
                continue
            self._handlers[type(message)](identity, message, now_seconds)

    def store(self, now_seconds: float) -> None:
        """Stores waiting segments as far as the rate limiter allows, and acknowledges them once they are written."""
        while self._waiting:
            actor, segment, columns, refusal = self._waiting[0]
            if columns is None:
                self.dropped[refusal] += 1
                self._replay.refuse(segment, refusal)
            elif self._replay.can_insert(segment.transitions):
                self._replay.insert(segment, columns, now_seconds)
            else:
                break
            actor.waiting.popleft()
            self._waiting.popleft()
            if not actor.waiting:
                self._gone.pop(actor.run_id, None)
        self._replay.flush(now_seconds)
        for identity, actor in self.actors.items():
            if self._stored(actor) > actor.acknowledged:
                self._acknowledge(identity, actor, now_seconds)

    def forget_the_dead(self, now_seconds: float) -> None:
        """Frees the places of actors that have been silent for too long."""
        self._log_lines.tick(now_seconds)
        if 0 < self._unread_after <= 2 * MAX_ACTORS:
            return  # the heartbeat of an actor may still be unread
        for identity, actor in list(self.actors.items()):
            if now_seconds - actor.seen_seconds > PEER_TIMEOUT_SECONDS:
                message = "actor %s has been silent for %.0f s: its places are free"
                self._log_lines.warning(message, identity.hex(), PEER_TIMEOUT_SECONDS)
                self._remove(identity)

    def finish(self, reason: str) -> None:
        """Tells every actor that the run is over."""
        for identity in self.actors:
            sockets.send(self._socket, Finish(reason=reason), identity)

    def totals(self) -> dict[str, int]:
        """Returns the ledger: transitions by what became of them, and under "produced" their sum."""
        waiting: Counter[int] = Counter()
        for each in self._waiting:
            waiting[each.actor.run_id] += each.segment.transitions
        return self._replay.ledger.totals({actor.run_id for actor in self.actors.values()}, waiting)

    def _on_hello(self, identity: bytes, message: ActorHello, now_seconds: float) -> None:
        if message.agreement != self._config.agreement:
            what = told(self._config.agreement, message.agreement, "the replay server", "this actor")
            reason = f"{what}; make them equal"
            self.dropped["another_config"] += 1
            sockets.send(self._socket, Refusal(reason=reason, final=True), identity)
            return
        if self._run_identity.differs(message.run_identity):
            self.dropped["another_run"] += 1
            reason = self._run_identity.refusal(message.run_identity, "this actor", "the replay server")
            sockets.send(self._socket, Refusal(reason=reason, final=True), identity)
            return
        if identity in self.actors and self.actors[identity].run_id == message.run_id:
            return  # said again before the welcome had arrived: a second one would have everything sent twice
        if len(self.actors) >= MAX_ACTORS and all(actor.run_id != message.run_id for actor in self.actors.values()):
            self.dropped["too_many_actors"] += 1
            reason = f"the replay server has the {MAX_ACTORS} actors it can have; use fewer, of more environments each"
            sockets.send(self._socket, Refusal(reason=reason, final=False), identity)
            return
        before = next((other for other, actor in self.actors.items() if actor.run_id == message.run_id), None)
        if before is not None and message.acknowledged > (stored := self._stored(self.actors[before])):
            self.dropped["bad_acknowledgement"] += 1  # believed, it would have the segments of that actor refused
            known = f"an actor whose segments were acknowledged up to {stored}"
            reason = f"acknowledged={message.acknowledged} of {known}: start this actor again"
            sockets.send(self._socket, Refusal(reason=reason, final=False), identity)
            return
        welcome = self._welcome(message, before, now_seconds)
        if before is None:  # or the next server might give its incarnation to another
            self._replay.welcome(message.run_id, welcome.incarnation)
            self._replay.flush(now_seconds)
        if not sockets.send(self._socket, welcome, identity):
            return  # an actor has given this connection up, and may have been welcomed on the next: nothing changes
        actor = self._joining(message, welcome) if before is None else self.actors.pop(before)
        if identity in self.actors:
            self._remove(identity)  # one connection is one actor, whatever it says
        actor.seen_seconds = actor.answered_seconds = now_seconds
        # An earlier claim that no segment has borne out does not count: another may have made it in this actor's name.
        newest = actor.waiting[-1] if actor.waiting else self._replay.ledger.sequence(actor.run_id)
        actor.received = max(newest, message.acknowledged)
        self._discard_early(actor)  # all that it keeps comes again
        actor.acknowledged = 0  # what it was told before may not have arrived
        self.actors[identity] = actor
        self._replay.ledger.connected.add(actor.run_id)
        text = "actor %s joins with %d environments (%d actors)"
        self._log_lines.info(text, identity.hex(), len(actor.places), len(self.actors))

    def _welcome(self, message: ActorHello, before: bytes | None, now_seconds: float) -> ActorWelcome:
        """Finds an actor places: those it has on the connection `before`, or got from a server before, or new ones."""
        incarnation, places = message.incarnation, message.places
        if before is not None:
            incarnation, places = self.actors[before].incarnation, self.actors[before].places
        elif (is_new := not self._is_believed(incarnation)) or not self._fit(places, message.num_environments):
            incarnation = self._replay.incarnations + 1 if is_new else incarnation
            places = choose_places(self._occupants_heard_since(now_seconds - QUIET_SECONDS), message.num_environments)
        return ActorWelcome(
            incarnation=incarnation,
            places=places,
            ladder_size=self._config.ladder_size,
            max_outstanding_segments=self._config.actor.max_outstanding_segments,
            run_identity=self._run_identity.name,
        )

    def _joining(self, message: ActorHello, welcome: ActorWelcome) -> Actor:
        """Gives an actor the places to which it was welcomed."""
        incarnation, places = welcome.incarnation, welcome.places
        np.add.at(self._occupants, places, 1)
        self._replay.incarnations = max(self._replay.incarnations, incarnation)
        before = self._gone.pop(message.run_id, None)
        if before is not None:  # what waits counts against its credit as before
            before.incarnation, before.places = incarnation, places
            return before
        status = ActorStatus(run_id=message.run_id, steps_per_second=0.0, weights_version=0)
        received = self._replay.ledger.sequence(message.run_id)
        return Actor(message.run_id, incarnation, places, 0.0, status, received)

    def _occupants_heard_since(self, seconds: float) -> np.ndarray:
        """The living environments at each place without those of actors that may be dead, such as one started again."""
        occupants = self._occupants.copy()
        for actor in self.actors.values():
            if actor.seen_seconds < seconds:
                np.subtract.at(occupants, actor.places, 1)
        return occupants

    def _is_believed(self, incarnation: int) -> bool:
        """Tells whether an actor can have an incarnation; it may be one after the largest, which another claimed."""
        return 1 <= incarnation <= max(MAX_INCARNATION, self._replay.incarnations)

    def _fit(self, places: np.ndarray, num_environments: int) -> bool:
        on_ladder = not places.size or (places.min() >= 0 and places.max() < self._config.ladder_size)
        return bool(on_ladder) and places.size == num_environments

    def _on_segment(self, identity: bytes, message: SegmentMessage, now_seconds: float) -> None:
        actor = self.actors[identity]
        self._replay.ledger.hear(actor.run_id, message.produced)
        if message.sequence <= actor.received or message.sequence in actor.early:
            self.dropped["duplicate_segment"] += 1
        elif len(actor.waiting) + len(actor.early) >= self._config.actor.max_outstanding_segments:
            self.dropped["over_credit"] += 1  # not a sender of ours: they count
        elif message.sequence > actor.received + 1:
            self._hold_early(identity, actor, message)
        else:
            self._take(actor, message)
            while (following := actor.early.pop(actor.received + 1, None)) is not None:
                self._early_bytes -= len(following.body)
                self._take(actor, following)
        if now_seconds - actor.answered_seconds >= ANSWER_SECONDS and identity in self.actors:
            self._acknowledge(identity, actor, now_seconds)

    def _hold_early(self, identity: bytes, actor: Actor, message: SegmentMessage) -> None:
        """Holds a segment until those before it have come; with too many bytes held, has its actor send all again."""
        if self._early_bytes + len(message.body) > EARLY_BYTES:
            self.dropped["too_many_early"] += 1 + len(actor.early)
            self._remove(identity)
            sockets.send(self._socket, Rejoin(), identity)
            return
        self.dropped["early_segment"] += 1
        actor.early[message.sequence] = message
        self._early_bytes += len(message.body)

    def _discard_early(self, actor: Actor) -> None:
        self._early_bytes -= sum(len(message.body) for message in actor.early.values())
        actor.early.clear()

    def _take(self, actor: Actor, message: SegmentMessage) -> None:
        actor.received = message.sequence
        actor.waiting.append(message.sequence)
        columns, transitions, steps, refusal = None, message.transitions, message.environment_steps, ""
        if steps > self._spec.max_environment_steps(len(actor.places)):
            steps, refusal = 0, "impossible_steps"
        elif zlib.crc32(message.body) != message.crc:
            refusal = "bad_checksum"
        else:
            try:
                columns = decode_columns(message.body, self._spec, self._limits)
                transitions = int(np.count_nonzero(columns["priority"]))
            except CorruptSegment as error:
                refusal = error.reason
        segment = SegmentRecord(actor.run_id, message.sequence, steps, transitions, message.body, message.crc)
        self._waiting.append(Waiting(actor, segment, columns, refusal))

    def _stored(self, actor: Actor) -> int:
        """Returns the sequence number up to which every segment of an actor is stored, or refused."""
        return actor.waiting[0] - 1 if actor.waiting else actor.received

    def _acknowledge(self, identity: bytes, actor: Actor, now_seconds: float) -> None:
        stored = self._stored(actor)
        if sockets.send(self._socket, SegmentAck(sequence=stored), identity):
            actor.acknowledged, actor.answered_seconds = stored, now_seconds

    def _on_episodes(self, identity: bytes, message: EpisodeStatistics, now_seconds: float) -> None:
        if not self.episodes.add(message):
            self.dropped["bad_statistics"] += 1

    def _on_status(self, identity: bytes, message: ActorStatus, now_seconds: float) -> None:
        actor = self.actors[identity]
        if message.run_id == actor.run_id:
            actor.status = message
            self._replay.ledger.report(message.run_id, _counts(message))
            if self._stored(actor) > actor.written:  # an actor that is held back does not make the log grow
                self._write_down(actor)
        if actor.early:  # messages keep their order: a segment before these was damaged on its way, and must come again
            self._remove(identity)
            sockets.send(self._socket, Rejoin(), identity)
        else:
            self._acknowledge(identity, actor, now_seconds)  # for the actor, a sign of life

    def _write_down(self, actor: Actor) -> None:
        """Has the journal know what an actor produced, should it and this server die at once."""
        actor.written = self._stored(actor)
        produced = max(actor.status.produced, self._replay.ledger.produced(actor.run_id))
        if produced:
            counts = _counts(actor.status)
            self._replay.record_counts(actor.run_id, counts._replace(produced=produced))

    def _on_goodbye(self, identity: bytes, message: Goodbye, now_seconds: float) -> None:
        self._remove(identity)
        self._log_lines.info("actor %s leaves (%d actors)", identity.hex(), len(self.actors))

    def _remove(self, identity: bytes) -> None:
        actor = self.actors.pop(identity)
        self._replay.ledger.connected.discard(actor.run_id)
        np.subtract.at(self._occupants, actor.places, 1)
        self._write_down(actor)
        self._discard_early(actor)  # if the actor comes back, it has them still, and sends them
        if actor.waiting:
            self._gone[actor.run_id] = actor
            self._bound_gone()

    def _bound_gone(self) -> None:
        """Lets go of what has waited longest of actors that left; one that comes back still has it, and sends it."""
        number = sum(len(actor.waiting) for actor in self._gone.values())
        most = GONE_ACTORS * self._config.actor.max_outstanding_segments
        let_go = set()
        while number > most:
            run_id = next(iter(self._gone))
            let_go.add(run_id)
            number -= len(self._gone.pop(run_id).waiting)
        if let_go:
            kept = [waiting for waiting in self._waiting if waiting.actor.run_id not in let_go]
            self.dropped["left_by_actor"] += len(self._waiting) - len(kept)
            self._waiting = deque(kept)


def _counts(status: ActorStatus) -> ActorCounts:
    return ActorCounts(status.produced, status.acknowledged, status.overflow, status.unencodable, status.unsent)
