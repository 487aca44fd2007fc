"""Which replay server each actor belongs to, so that all fill evenly. No sockets."""

from __future__ import annotations

from apex_jax.types import MAX_SHARDS

NOWHERE = MAX_SHARDS  # shard of an actor that has none yet, or of a client that is no actor


class Placement:
    """The environments that act for each replay server (shard), as known to the learner.

    A new actor gets the shard with the fewest environments. An actor moves to that shard if its own one is closed, or
    has so many more that it would still have more without this actor.
    """

    def __init__(self, shards: int) -> None:
        self.closed: frozenset[int] = frozenset()  # shards that are gone; if all are, none is avoided
        self._loads = [0] * shards

    def place(self, environments: int, current: int, may_balance: bool = True) -> int:
        """Returns the shard of an actor, and counts the actor there. `current`: the shard where it was counted before.

        `may_balance`: whether an actor may move from one open shard to another; not before all have had time to join.
        """
        shards = range(len(self._loads))
        choice = [shard for shard in shards if shard not in self.closed] or shards
        least = min(choice, key=self._loads.__getitem__)
        is_even = current in choice and self._loads[current] - self._loads[least] <= environments
        if current in choice and (is_even or not may_balance):
            return current
        self.remove(environments, current)
        self._loads[least] += environments
        return least

    def add(self, environments: int, shard: int) -> int:
        """Counts an actor that has a shard; returns it, or NOWHERE if there is none of this number."""
        if shard >= len(self._loads):
            return NOWHERE
        self._loads[shard] += environments
        return shard

    def remove(self, environments: int, shard: int) -> None:
        """Counts an actor no more."""
        if shard != NOWHERE:
            self._loads[shard] -= environments
