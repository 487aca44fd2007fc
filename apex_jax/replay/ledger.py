"""The ledger: what became of every transition that any actor has produced, over all restarts of the replay server.

    produced = stored + in_flight + lost_with_actor + lost_with_replay + dropped_<reason> + ...

An actor tells how many it has produced, had acknowledged and dropped; the server knows what it has stored and refused.
Counts are totals since the actor began, so a lost report costs nothing: the next one makes up for it. What an actor has
produced and nobody has accounted for is in flight while the actor lives, and lost with it when it is gone. An actor
reports every second; each segment says how much it has produced, and its goodbye what it drops. If it is killed, or
leaves while cut off, what it produced after its last report that arrived is in no count.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from apex_jax.segment_codec import CorruptSegment

REMEMBERED_RUNS = 4096  # actors, of which each has its own account; what is forgotten is summed up
REFUSALS = ("bad_checksum", *CorruptSegment.REASONS, "impossible_steps")  # why a segment that came is not stored
DROPS = ("overflow", "unencodable", "unsent")  # what an actor drops itself


class ActorCounts(NamedTuple):
    """What an actor tells of the transitions that it has produced since it began."""

    produced: int
    acknowledged: int
    overflow: int  # dropped: no room, and actor.overflow=drop
    unencodable: int  # dropped: not finite, for example
    unsent: int  # dropped: the actor left before they could be sent


@dataclass
class Account:
    """Transitions of one actor process."""

    sequence: int = 0  # of its newest segment stored or refused
    stored: int = 0
    refused: int = 0
    produced: int = 0  # as the actor told last, and so on
    acknowledged: int = 0
    overflow: int = 0
    unencodable: int = 0
    unsent: int = 0


_fields = attrgetter(*(field.name for field in fields(Account)))
COLUMNS = 1 + len(fields(Account))  # of `Ledger.to_array`
TOTALS = (
    *("produced", "stored", "in_flight", "lost_with_actor", "lost_with_replay"),
    *(f"dropped_{reason}" for reason in DROPS),
)


class Ledger:
    """Accounts of all actors there have been."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()  # transitions, by reason
        self.forgotten: Counter[str] = Counter()  # sums of the accounts that are no longer kept
        self.connected: set[int] = set()  # run ids of connected actors, fewer than REMEMBERED_RUNS: never forgotten
        self._accounts: OrderedDict[int, Account] = OrderedDict()  # by run id, the one heard of last at the end

    def account(self, run_id: int) -> Account:
        """Returns the account of an actor, a new one for an actor not heard of."""
        account = self._accounts.get(run_id)
        if account is None:
            if len(self._accounts) >= REMEMBERED_RUNS:
                self._forget_one()
            account = self._accounts[run_id] = Account()
        else:
            self._accounts.move_to_end(run_id)
        return account

    def _forget_one(self) -> None:
        """Sums up the account heard of longest ago; one in which nothing is counted goes before all others.

        The account of a connected actor stays: its next report would be counted on top of the sum.
        """
        away = [item for item in self._accounts.items() if item[0] not in self.connected] or self._accounts.items()
        empty = (run_id for run_id, account in away if not (account.produced or account.stored or account.refused))
        run_id = next(empty, next(iter(away))[0])
        self.forgotten.update(_totals(self._rows([run_id]), np.zeros(1, np.int64)))
        del self._accounts[run_id]

    def sequence(self, run_id: int) -> int:
        """Returns the sequence number of an actor's newest segment stored or refused, 0 of one not heard of."""
        account = self._accounts.get(run_id)
        return 0 if account is None else account.sequence

    def produced(self, run_id: int) -> int:
        """Returns how much an actor has produced as it told last, 0 of one not heard of."""
        account = self._accounts.get(run_id)
        return 0 if account is None else account.produced

    def report(self, run_id: int, counts: ActorCounts) -> None:
        """Takes what an actor tells of itself; counts never fall, and whoever has counted nothing needs no account."""
        if run_id not in self._accounts and not any(counts):
            return
        account = self.account(run_id)
        for name, count in zip(counts._fields, counts, strict=True):
            setattr(account, name, max(getattr(account, name), count))

    def hear(self, run_id: int, produced: int) -> None:
        """Takes how much an actor had produced when it sent a segment."""
        account = self.account(run_id)
        account.produced = max(account.produced, produced)

    def store(self, run_id: int, sequence: int, transitions: int) -> None:
        """Counts a segment that was stored."""
        account = self.account(run_id)
        account.sequence = max(account.sequence, sequence)
        account.stored += transitions

    def refuse(self, run_id: int, sequence: int, transitions: int, reason: str) -> None:
        """Counts a segment that was refused, for one of REFUSALS."""
        account = self.account(run_id)
        account.sequence = max(account.sequence, sequence)
        account.refused += transitions
        self.refused[reason] += transitions

    def totals(self, connected: Collection[int], waiting: Mapping[int, int]) -> dict[str, int]:
        """Returns transitions by what became of them, and under "produced" their sum.

        `connected`: run ids of the actors that are there; `waiting`: transitions by run id that the server holds and
        has yet to store.
        """
        here = [2**62 if run_id in connected else waiting.get(run_id, 0) for run_id in self._accounts]
        totals = Counter(self.forgotten)
        totals.update(_totals(self.to_array(), np.array(here, np.int64)))
        return {name: totals[name] for name in TOTALS} | {f"dropped_{why}": n for why, n in self.refused.items()}

    def to_array(self) -> np.ndarray:
        """Returns int64[N, COLUMNS]: run id and account of each actor, the one heard of last at the end."""
        return self._rows(self._accounts)

    def _rows(self, run_ids: Iterable[int]) -> np.ndarray:
        rows = [(run_id, *_fields(self._accounts[run_id])) for run_id in run_ids]
        return np.array(rows, np.int64).reshape(-1, COLUMNS)

    @classmethod
    def from_array(cls, rows: np.ndarray, refused: Mapping[str, int], forgotten: Mapping[str, int]) -> Ledger:
        """Returns the ledger that `to_array` was asked of, with its sums."""
        ledger = cls()
        ledger.refused.update(refused)
        ledger.forgotten.update(forgotten)
        for run_id, *numbers in rows.tolist():
            ledger._accounts[run_id] = Account(*numbers)
        return ledger


def _totals(rows: np.ndarray, here: np.ndarray) -> dict[str, int]:
    """Returns the sums of some accounts; `here` int64[N]: up to how much of what nobody answers for is in flight.

    The server may have answered for more than its actor has heard of, or, where it has lost its memory, for less.
    """
    _, _, stored, refused, produced, acknowledged, overflow, unencodable, unsent = rows.T
    answered = stored + refused
    heard = np.maximum(answered, acknowledged)
    dropped = overflow + unencodable + unsent
    produced = np.maximum(produced, heard + dropped)
    rest = produced - heard - dropped
    in_flight = np.minimum(rest, here)
    columns = (produced, stored, in_flight, rest - in_flight, heard - answered, overflow, unencodable, unsent)
    return {name: int(column.sum()) for name, column in zip(TOTALS, columns, strict=True)}
