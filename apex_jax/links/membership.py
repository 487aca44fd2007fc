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
