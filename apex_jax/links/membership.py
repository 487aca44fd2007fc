"""Which actors there are, where they stand on the exploration ladder, and whose segment is stored next: no socket."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from apex_jax.agent.exploration import choose_ladder_indices
from apex_jax.transport.messages import ActorHello, ActorStatus
from apex_jax.types import Columns, SegmentRecord

MAX_INCARNATION = 2**32  # that an actor is believed: what comes after it must be a number of the protocol, too
QUIET_SECONDS = 3.0  # an actor speaks every second: the place of one that does not is better given twice than lost


class Waiting(NamedTuple):
    """A segment that has arrived and waits until the rate limiter lets it in."""

    segment: SegmentRecord
    columns: Columns | None
    refusal: str  # why it is not to be stored; empty if it is


@dataclass(eq=False)
class Actor:
    """What the server knows of an actor."""

    run_id: int
    incarnation: int  # how many actors had come before, and this one
    ladder_indices: np.ndarray  # int32[E], on the ladder of exploration
    status: ActorStatus
    received: int  # every segment up to this sequence number has arrived
    seen_seconds: float = 0.0
    waiting: deque[Waiting] = field(default_factory=deque)
    acknowledged: int = 0  # newest sequence number it was sent, on this connection, ...
    answered_seconds: float = 0.0  # ... and when
    written: int = 0  # up to this sequence number were its segments stored when its counts were last written down

    @property
    def stored(self) -> int:
        """The sequence number up to which every segment of the actor is stored, or refused."""
        return self.waiting[0].segment.sequence - 1 if self.waiting else self.received

    @property
    def newest_waiting(self) -> int:
        """The sequence number of the newest segment that waits, 0 if none does."""
        return self.waiting[-1].segment.sequence if self.waiting else 0


class Membership:
    """The actors that are connected, and those that have left while segments of theirs wait."""

    def __init__(self, ladder_size: int, most_left_behind: int) -> None:
        """`most_left_behind`: segments that may wait of actors that have left."""
        self.actors: dict[bytes, Actor] = {}  # by connection
        self.gone: dict[int, Actor] = {}  # by run id, the one that left first at the beginning
        self._most_left_behind = most_left_behind
        self._occupants = np.zeros(ladder_size, np.int64)
        self._turns: deque[Actor | None] = deque()  # of connected actors with waiting segments; None = of those gone

    # Joining and leaving

    def connection_of(self, run_id: int) -> bytes | None:
        """Returns the connection of an actor, None if it has none."""
        return next((identity for identity, actor in self.actors.items() if actor.run_id == run_id), None)

    def choose(self, hello: ActorHello, incarnations: int, now_seconds: float) -> tuple[int, np.ndarray]:
        """Returns an actor's incarnation and places: those that it brings along, as far as they can be; or new ones.

        `incarnations`: given so far, by this server and those before it.
        """
        connection = self.connection_of(hello.run_id)
        if connection is not None:
            return self.actors[connection].incarnation, self.actors[connection].ladder_indices
        # It may be one after the largest, which another has claimed.
        is_believed = 1 <= hello.incarnation <= max(MAX_INCARNATION, incarnations)
        incarnation, ladder_indices = hello.incarnation if is_believed else incarnations + 1, hello.ladder_indices
        on_ladder = not ladder_indices.size or 0 <= ladder_indices.min() <= ladder_indices.max() < len(self._occupants)
        if not (is_believed and on_ladder and ladder_indices.size == hello.num_environments):
            ladder_indices = choose_ladder_indices(
                self._occupants_seen_since(now_seconds - QUIET_SECONDS), hello.num_environments
            )
        return incarnation, ladder_indices

    def join(self, identity: bytes, actor: Actor) -> None:
        """Adds an actor that is not connected, or moves one to this connection, which nobody has."""
        if (connection := self.connection_of(actor.run_id)) is not None:
            del self.actors[connection]
        else:
            np.add.at(self._occupants, actor.ladder_indices, 1)
            if self.gone.pop(actor.run_id, None) is not None:
                self._turns.append(actor)
                self._end_turns_of_gone()
        self.actors[identity] = actor

    def leave(self, identity: bytes) -> int:
        """Removes an actor, whose places are free; returns how many waiting segments of gone actors are discarded.

        An actor that comes back has those still, and sends them again.
        """
        actor = self.actors.pop(identity)
        np.subtract.at(self._occupants, actor.ladder_indices, 1)
        if not actor.waiting:
            return 0
        self._turns.remove(actor)
        self._turns.extend([None] * (not self.gone))
        self.gone[actor.run_id] = actor
        left_behind, discarded = sum(len(each.waiting) for each in self.gone.values()), 0
        while left_behind - discarded > self._most_left_behind:
            oldest = self.gone.pop(next(iter(self.gone)))
            discarded += len(oldest.waiting)
        self._end_turns_of_gone()
        return discarded

    def silent_since(self, seconds: float) -> list[bytes]:
        """Returns the connections over which nothing has come since then."""
        return [identity for identity, actor in self.actors.items() if actor.seen_seconds < seconds]

    def _occupants_seen_since(self, seconds: float) -> np.ndarray:
        """Returns the environments at each place without those of actors that may be dead, such as a killed one."""
        occupants = self._occupants.copy()
        for identity in self.silent_since(seconds):
            np.subtract.at(occupants, self.actors[identity].ladder_indices, 1)
        return occupants

    # Waiting segments

    def enqueue(self, actor: Actor, waiting: Waiting) -> None:
        """Adds a segment of a connected actor."""
        if not actor.waiting:
            self._turns.append(actor)
        actor.waiting.append(waiting)

    def next_waiting(self) -> Waiting | None:
        """Returns the segment that is to be stored next, None if none waits.

        Actors take turns, and those that have left share one: no connection takes more than its share.
        """
        if not self._turns:
            return None
        actor = self._turns[0] or next(iter(self.gone.values()))
        return actor.waiting[0]

    def dequeue(self) -> None:
        """Removes that segment, and ends the turn."""
        turn = self._turns.popleft()
        actor = turn or next(iter(self.gone.values()))
        actor.waiting.popleft()
        if turn is None and not actor.waiting:
            del self.gone[actor.run_id]
        if self.gone if turn is None else actor.waiting:
            self._turns.append(turn)

    def _end_turns_of_gone(self) -> None:
        if not self.gone:
            self._turns.remove(None)

    def waiting_transitions(self) -> dict[int, int]:
        """Returns the transitions of waiting segments by run id."""
        actors = [*self.actors.values(), *self.gone.values()]
        return {actor.run_id: sum(each.segment.transitions for each in actor.waiting) for actor in actors}
