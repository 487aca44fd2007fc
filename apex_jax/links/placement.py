"""Which replay server each actor belongs to, so that all fill evenly. No sockets."""

from __future__ import annotations

from apex_jax.types import MAX_SERVERS

NOWHERE = MAX_SERVERS  # server of an actor that has none yet, or of a client that is no actor


class Placement:
    """The environments that act for each replay server, as known to the learner.

    A new actor gets the server with the fewest environments. An actor moves to that server if its own one is closed, or
    has so many more that it would still have more without this actor.
    """

    def __init__(self, servers: int) -> None:
        self.closed: frozenset[int] = frozenset()  # servers that are gone; if all are, none is avoided
        self._loads = [0] * servers

    def place(self, environments: int, current: int, may_balance: bool = True) -> int:
        """Returns the server of an actor, and counts the actor there. `current`: the server that counted it before.

        `may_balance`: whether an actor may move from one open server to another; not before all have had time to join.
        """
        servers = range(len(self._loads))
        choice = [server for server in servers if server not in self.closed] or servers
        least = min(choice, key=self._loads.__getitem__)
        is_even = current in choice and self._loads[current] - self._loads[least] <= environments
        if current in choice and (is_even or not may_balance):
            return current
        self.remove(environments, current)
        self._loads[least] += environments
        return least

    def add(self, environments: int, server: int) -> int:
        """Counts an actor that has a server; returns the server, or NOWHERE if there is no server of this number."""
        if server >= len(self._loads):
            return NOWHERE
        self._loads[server] += environments
        return server

    def remove(self, environments: int, server: int) -> None:
        """Stops counting an actor."""
        if server != NOWHERE:
            self._loads[server] -= environments
