"""The actors, their indices on the exploration ladder, and the order in which their segments are stored. No sockets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from apex_jax.agent.exploration import choose_ladder_indices
from apex_jax.transport.messages import ActorHello, ActorStatus
from apex_jax.types import Columns, SegmentRecord

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
    connection: bytes = b""  # of the present, or the last one
    seen_seconds: float = 0.0
    waiting: deque[Waiting] = field(default_factory=deque)
    acknowledged: int = 0  # newest sequence number acknowledged on this connection
    answered_seconds: float = 0.0  # time of the last acknowledgement
    written: int = 0  # value of `stored` when its counts were last written to the journal

    @property
    def stored(self) -> int:
        """Every segment up to this sequence number is stored or refused."""
        return self.waiting[0].segment.sequence - 1 if self.waiting else self.received

    @property
    def newest_waiting(self) -> int:
        """Sequence number of the newest pending segment, 0 if there is none."""
        return self.waiting[-1].segment.sequence if self.waiting else 0


class Membership:
    """The connected actors, and the disconnected actors that have pending segments."""

    def __init__(self, ladder_size: int, most_left_behind: int, index: int = 0, servers: int = 1) -> None:
        """`most_left_behind`: maximum number of pending segments of disconnected actors.

        `index`: of this server among the `servers` of the run. It assigns every `servers`-th ladder index and
        actor number, so that no two servers assign the same one, and its actors explore over the whole ladder.
        """
        self.actors: dict[bytes, ActorPeer] = {}  # by connection
        self.gone: dict[int, ActorPeer] = {}  # disconnected actors with pending segments, by peer id, oldest first
        self._most_left_behind = most_left_behind
        self._index, self._servers = index, servers
        self._occupants = np.zeros(ladder_size, np.int64)
        self._turns: deque[ActorPeer | None] = deque()  # connected actors with pending segments; None = all of `gone`

    # Joining and leaving

    def connection_of(self, peer_id: int) -> bytes | None:
        """Returns the connection of an actor, or None."""
        return next((connection_id for connection_id, actor in self.actors.items() if actor.peer_id == peer_id), None)

    def choose(self, hello: ActorHello, highest_actor_number: int, now_seconds: float) -> tuple[int, np.ndarray]:
        """Returns an actor's number and ladder indices: those of its hello if they are valid, else new ones.

        An actor that comes from another server brings its ladder indices, but no actor number.
        `highest_actor_number`: highest one assigned so far, by this server and those before it.
        """
        connection = self.connection_of(hello.peer_id)
        if connection is not None:
            return self.actors[connection].actor_number, self.actors[connection].ladder_indices
        # An assigned actor number may exceed MAX_ACTOR_NUMBER, after another actor has claimed the maximum.
        is_believed = 1 <= hello.actor_number <= max(MAX_ACTOR_NUMBER, highest_actor_number)
        actor_number = hello.actor_number if is_believed else self._next_actor_number(highest_actor_number)
        ladder_indices = hello.ladder_indices
        on_ladder = not ladder_indices.size or 0 <= ladder_indices.min() <= ladder_indices.max() < len(self._occupants)
        is_new = hello.actor_number == 0
        if not ((is_believed or is_new) and on_ladder and ladder_indices.size == hello.num_environments):
            occupants = self._occupants_seen_since(now_seconds - QUIET_SECONDS)[self._index :: self._servers]
            places = choose_ladder_indices(occupants, hello.num_environments)
            ladder_indices = places * np.int32(self._servers) + np.int32(self._index)
        return actor_number, ladder_indices

    def _next_actor_number(self, highest_actor_number: int) -> int:
        """Returns the lowest actor number above `highest_actor_number` that this server may assign."""
        return self._index + 1 + self._servers * max(0, -((self._index - highest_actor_number) // self._servers))

    def join(self, connection_id: bytes, actor: ActorPeer) -> None:
        """Adds an actor, or moves it to this connection, which must be unused."""
        if (connection := self.connection_of(actor.peer_id)) is not None:
            del self.actors[connection]
        else:
            np.add.at(self._occupants, actor.ladder_indices, 1)
            if self.gone.pop(actor.peer_id, None) is not None:
                self._turns.append(actor)
                self._end_turns_of_gone()
        self.actors[connection_id] = actor
        actor.connection = connection_id

    def leave(self, connection_id: bytes) -> int:
        """Removes an actor and frees its indices; returns how many pending segments of `gone` are discarded.

        An actor that reconnects still has the discarded segments, and sends them again.
        """
        actor = self.actors.pop(connection_id)
        np.subtract.at(self._occupants, actor.ladder_indices, 1)
        if not actor.waiting:
            return 0
        self._turns.remove(actor)
        self._turns.extend([None] * (not self.gone))
        self.gone[actor.peer_id] = actor
        left_behind, discarded = sum(len(each.waiting) for each in self.gone.values()), 0
        while left_behind - discarded > self._most_left_behind:
            oldest = self.gone.pop(next(iter(self.gone)))
            discarded += len(oldest.waiting)
        self._end_turns_of_gone()
        return discarded

    def silent_since(self, seconds: float) -> list[bytes]:
        """Returns the connections that have received nothing since then."""
        return [connection_id for connection_id, actor in self.actors.items() if actor.seen_seconds < seconds]

    def _occupants_seen_since(self, seconds: float) -> np.ndarray:
        """Returns the number of environments at each ladder index, without those of silent, probably dead actors."""
        occupants = self._occupants.copy()
        for connection_id in self.silent_since(seconds):
            np.subtract.at(occupants, self.actors[connection_id].ladder_indices, 1)
        return occupants

    # Pending segments

    def enqueue(self, actor: ActorPeer, waiting: Waiting) -> None:
        """Adds a segment of a connected actor."""
        if not actor.waiting:
            self._turns.append(actor)
        actor.waiting.append(waiting)

    def next_waiting(self) -> Waiting | None:
        """Returns the segment to be stored next, or None.

        Actors take turns, and all disconnected actors share one turn, so that no connection exceeds its share.
        """
        if not self._turns:
            return None
        actor = self._turns[0] or next(iter(self.gone.values()))
        return actor.waiting[0]

    def dequeue(self) -> ActorPeer:
        """Removes the segment that `next_waiting` returns, and ends the turn; returns the actor of the segment."""
        turn = self._turns.popleft()
        actor = turn or next(iter(self.gone.values()))
        actor.waiting.popleft()
        if turn is None and not actor.waiting:
            del self.gone[actor.peer_id]
        if self.gone if turn is None else actor.waiting:
            self._turns.append(turn)
        return actor

    def _end_turns_of_gone(self) -> None:
        if not self.gone:
            self._turns.remove(None)

    def waiting_transitions(self) -> dict[int, int]:
        """Returns the transitions in pending segments, by peer id."""
        actors = [*self.actors.values(), *self.gone.values()]
        return {actor.peer_id: sum(each.segment.transitions for each in actor.waiting) for actor in actors}
