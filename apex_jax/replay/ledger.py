"""The ledger: the outcome of every transition that any actor has produced, across restarts of the replay server.

    produced = stored + in_flight + lost_with_actor + lost_with_replay + dropped_<reason> + ...

An actor reports how many transitions it has produced, dropped, and received acknowledgements for; the server counts the
stored and the refused ones. Counts are totals since the actor started, so the next report makes up for a lost one.
Produced transitions without any other outcome are in flight while their actor is connected; afterwards only those that
the server has yet to store, and the rest are lost with the actor. Acknowledged transitions that the server has not
counted, because it lost its state, are lost with the replay.

An actor reports every second. Each of its segments also contains the number of transitions produced so far, and its
final report the number that it drops. A transition is an environment step: `steps` counts those of the run. If an
actor is killed, or leaves without a connection, the transitions that it produced after its last received report are
not counted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from apex_jax.segment_codec import CorruptSegment

REMEMBERED_RUNS = 4096  # maximum number of actors; evicted counts are added to `Ledger.forgotten`
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
    before: int = 0  # of `produced`: counted by a replay that is lost, so not again among the steps of the run


_fields = attrgetter(*(field.name for field in fields(TransitionCounts)))
COLUMNS = 1 + len(fields(TransitionCounts))  # of `Ledger.to_array`
TOTALS = (
    *("produced", "stored", "in_flight", "lost_with_actor", "lost_with_replay"),
    *(f"dropped_{reason}" for reason in DROPS),
)


class Ledger:
    """The counts of all actors of the run."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()  # transitions by reason
        self.forgotten: Counter[str] = Counter()  # sums of the evicted counts
        self.connected: set[int] = set()  # peer ids of connected actors, fewer than REMEMBERED_RUNS; never evicted
        self.steps = 0  # transitions of all actors, without those that a replay that is lost has counted
        self._counts: OrderedDict[int, TransitionCounts] = OrderedDict()  # by peer id, the most recently used one last

    def counts(self, peer_id: int) -> TransitionCounts:
        """Returns the counts of an actor; creates them for a new actor."""
        counts = self._counts.get(peer_id)
        if counts is None:
            if len(self._counts) >= REMEMBERED_RUNS:
                self._forget_one()
            counts = self._counts[peer_id] = TransitionCounts()
        else:
            self._counts.move_to_end(peer_id)
        return counts

    def _forget_one(self) -> None:
        """Adds the least recently used counts to the sums and evicts them; those that are 0 are evicted first.

        The counts of a connected actor stay, because its next report is a total, which includes the evicted counts.
        """
        away = [item for item in self._counts.items() if item[0] not in self.connected] or self._counts.items()
        empty = (peer_id for peer_id, counts in away if not (counts.produced or counts.stored or counts.refused))
        peer_id = next(empty, next(iter(away))[0])
        totals = _totals(self._rows([peer_id]), np.zeros(1, np.int64))
        counts = self._counts.pop(peer_id)
        self.forgotten.update(totals | {"before": counts.before})
        self.steps += totals["produced"] - counts.produced

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
        """Counts a stored segment. `produced`: by its actor so far."""
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
        """`is_late`: if the actor is unknown, a replay that is lost has stored segments of it."""
        if is_late and not (counts.sequence or counts.produced):
            counts.before = produced
        self.steps += max(0, produced - max(counts.produced, counts.before))
        counts.produced = max(counts.produced, produced)

    def totals(self, connected: Collection[int], waiting: Mapping[int, int]) -> dict[str, int]:
        """Returns the number of transitions by outcome, and their sum under "produced".

        `connected`: peer ids of the connected actors; `waiting`: by peer id, transitions that the server has received
        and not stored yet.
        """
        here = [2**62 if peer_id in connected else waiting.get(peer_id, 0) for peer_id in self._counts]
        totals = Counter(self.forgotten)
        totals.update(_totals(self.to_array(), np.array(here, np.int64)))
        return {name: totals[name] for name in TOTALS} | {f"dropped_{why}": n for why, n in self.refused.items()}

    def to_array(self) -> np.ndarray:
        """Returns int64[N, COLUMNS]: peer id and counts of each actor, the most recently used one last."""
        return self._rows(self._counts)

    def _rows(self, peer_ids: Iterable[int]) -> np.ndarray:
        rows = [(peer_id, *_fields(self._counts[peer_id])) for peer_id in peer_ids]
        return np.array(rows, np.int64).reshape(-1, COLUMNS)

    @classmethod
    def from_array(cls, rows: np.ndarray, refused: Mapping[str, int], forgotten: Mapping[str, int]) -> Ledger:
        """Returns the ledger of these `to_array` rows and sums."""
        ledger = cls()
        ledger.refused.update(refused)
        ledger.forgotten.update(forgotten)
        for peer_id, *numbers in rows.tolist():
            ledger._counts[peer_id] = TransitionCounts(*numbers)
        ledger.steps = ledger.forgotten["produced"] - ledger.forgotten["before"]
        ledger.steps += sum(each.produced - each.before for each in ledger._counts.values())
        return ledger


def _totals(rows: np.ndarray, here: np.ndarray) -> dict[str, int]:
    """Returns the sums of the counts of some actors.

    `here`: int64[N], at most this many of the transitions without an outcome are in flight; the rest are lost with
    their actor. The server may have counted more transitions than the actor has received acknowledgements for, or
    fewer if it lost its state.
    """
    _, _, stored, refused, produced, acknowledged, overflow, unencodable, unsent, _ = rows.T
    answered = stored + refused
    handled = np.maximum(answered, acknowledged)
    dropped = overflow + unencodable + unsent
    produced = np.maximum(produced, handled + dropped)
    rest = produced - handled - dropped
    in_flight = np.minimum(rest, here)
    columns = (produced, stored, in_flight, rest - in_flight, handled - answered, overflow, unencodable, unsent)
    return {name: int(column.sum()) for name, column in zip(TOTALS, columns, strict=True)}
