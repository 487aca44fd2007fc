"""The ledger: the outcome of every transition that any actor has produced, across restarts of the replay server.

    produced = stored + in_flight + lost_with_actor + lost_with_replay + dropped_<reason> + ...

An actor reports how many transitions it has produced, dropped, and received acknowledgements for; the server counts the
stored and the refused ones. Counts are totals since the actor started, so the next report makes up for a lost one.
Produced transitions without any other outcome are in flight while their actor is connected; afterwards they are lost
with the actor. Acknowledged transitions that the server has not counted, because it lost its state, are lost with the
replay.

An actor reports every second. Each of its segments also contains the number of transitions produced so far, and its
final report the number that it drops. A transition is an environment step: `steps` counts those of the run. If an
actor is killed, or leaves without a connection, the transitions that it produced after its last received report are
not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from apex_jax.segment_codec import CorruptSegment

REFUSALS = ("bad_checksum", *CorruptSegment.REASONS)  # reasons for not storing a received segment
DROPS = ("overflow", "unencodable", "unsent")  # reasons for which an actor drops transitions


class ActorCounts(NamedTuple):
    """An actor's own counts of the transitions that it has produced since it started."""

    produced: int
    acknowledged: int
    overflow: int  # dropped: no room, and actor.overflow=drop
    unencodable: int  # dropped: not finite, for example
    unsent: int  # dropped: the actor left before they were sent even once


@dataclass
class TransitionCounts:
    """The transitions of one actor process, by outcome."""

    sequence: int = 0  # of its newest segment stored or refused
    stored: int = 0
    refused: int = 0
    produced: int = 0  # as last reported by the actor, like the following fields
    acknowledged: int = 0
    overflow: int = 0
    unencodable: int = 0
    unsent: int = 0
    before: int = 0  # of `produced`: transitions counted by a lost replay, so not in the new one's `steps`


_fields = attrgetter(*(field.name for field in fields(TransitionCounts)))
COLUMNS = 1 + len(fields(TransitionCounts))  # of `Ledger.to_array`
TOTALS = (
    *("produced", "stored", "in_flight", "lost_with_actor", "lost_with_replay"),
    *(f"dropped_{reason}" for reason in DROPS),
)


class Ledger:
    """The counts of all actors of the run, and the highest number given to one."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()  # transitions by reason
        self.highest_actor_number = 0  # of the actors welcomed so far
        self.steps = 0  # transitions of all actors, without those that a lost replay has counted
        self._counts: dict[int, TransitionCounts] = {}  # by peer id

    def counts(self, peer_id: int) -> TransitionCounts:
        """Returns the counts of an actor; creates them for a new actor."""
        return self._counts.setdefault(peer_id, TransitionCounts())

    def sequence(self, peer_id: int) -> int:
        """Returns the sequence number of an actor's newest stored or refused segment; 0 for an unknown actor."""
        counts = self._counts.get(peer_id)
        return 0 if counts is None else counts.sequence

    def report(self, peer_id: int, reported: ActorCounts) -> None:
        """Records the counts that an actor reports. A count never decreases; all zeros add no actor."""
        if peer_id not in self._counts and not any(reported):
            return
        counts = self.counts(peer_id)
        self._record_produced(counts, reported.produced, is_late=reported.acknowledged > 0)
        for name, count in zip(reported._fields, reported, strict=True):
            setattr(counts, name, max(getattr(counts, name), count))

    def store(self, peer_id: int, sequence: int, produced: int, transitions: int) -> None:
        """Counts a stored segment. `produced`: transitions that its actor has produced so far."""
        self._answered(peer_id, sequence, produced).stored += transitions

    def refuse(self, peer_id: int, sequence: int, produced: int, transitions: int, reason: str) -> None:
        """Counts a refused segment; `reason`: one of REFUSALS."""
        self._answered(peer_id, sequence, produced).refused += transitions
        self.refused[reason] += transitions

    def _answered(self, peer_id: int, sequence: int, produced: int) -> TransitionCounts:
        counts = self.counts(peer_id)
        self._record_produced(counts, produced, is_late=sequence > 1)
        counts.sequence = max(counts.sequence, sequence)
        return counts

    def _record_produced(self, counts: TransitionCounts, produced: int, is_late: bool) -> None:
        """`is_late`: the actor has sent earlier segments; if it is unknown, a lost replay has counted them."""
        if is_late and not (counts.sequence or counts.produced):
            counts.before = produced
        self.steps += max(0, produced - max(counts.produced, counts.before))
        counts.produced = max(counts.produced, produced)

    def totals(self, connected: Collection[int]) -> dict[str, int]:
        """Returns the number of transitions by outcome, and their sum under "produced".

        `connected`: peer ids of the connected actors.
        """
        _, _, stored, refused, produced, acknowledged, overflow, unencodable, unsent, _ = self.to_array().T
        # The server may have counted more transitions than the actor has received acknowledgements for, or fewer if it
        # lost its state.
        answered = stored + refused
        handled = np.maximum(answered, acknowledged)
        dropped = overflow + unencodable + unsent
        produced = np.maximum(produced, handled + dropped)
        rest = produced - handled - dropped
        in_flight = rest * np.array([peer_id in connected for peer_id in self._counts], bool)
        columns = (produced, stored, in_flight, rest - in_flight, handled - answered, overflow, unencodable, unsent)
        totals = {name: int(column.sum()) for name, column in zip(TOTALS, columns, strict=True)}
        return totals | {f"dropped_{reason}": transitions for reason, transitions in self.refused.items()}

    def to_array(self) -> np.ndarray:
        """Returns int64[N, COLUMNS]: peer id and counts of each actor."""
        rows = [(peer_id, *_fields(counts)) for peer_id, counts in self._counts.items()]
        return np.array(rows, np.int64).reshape(-1, COLUMNS)

    @classmethod
    def from_array(cls, rows: np.ndarray, refused: Mapping[str, int], highest_actor_number: int) -> Ledger:
        """Returns the ledger of these `to_array` rows, refused transitions and actor number."""
        ledger = cls()
        ledger.highest_actor_number = highest_actor_number
        ledger.refused.update(refused)
        for peer_id, *numbers in rows.tolist():
            ledger._counts[peer_id] = TransitionCounts(*numbers)
        ledger.steps = sum(each.produced - each.before for each in ledger._counts.values())
        return ledger
