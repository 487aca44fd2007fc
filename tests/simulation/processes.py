"""Simulated processes, and what takes the place of their threads."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from apex_jax.links.connection import LinkClient
from tests.simulation.clock import Clock, Killed, Task
from tests.simulation.network import SimContext


class Process:
    """One process; a restart makes a new one of the same name."""

    def __init__(self, fleet: Any, name: str, host: str) -> None:
        self.fleet, self.name, self.host = fleet, name, host
        self.clock: Clock = fleet.clock
        self.is_alive, self.is_frozen, self.has_power = True, False, True
        self.sockets: list[Any] = []
        self.tasks: list[Task] = []
        self.context: Any = SimContext(fleet.network, self)
        self.effects_left: int | None = None  # until it is killed between two effects
        self.clock.trace("start", name)
        self.main = self.task(self.turn, 0.5)
        self.main.execute(self.start)
        self.main.wake()

    def start(self) -> None:
        raise NotImplementedError

    def turn(self, now: float) -> float | None:
        raise NotImplementedError

    def task(self, turn: Any, idle: float) -> Task:
        self.tasks.append(Task(self.clock, self, turn, idle))
        return self.tasks[-1]

    def effect(self) -> None:
        """Counts what others can see of this process; one that is to be killed ends here."""
        if self.effects_left is not None and self.is_alive:
            self.effects_left -= 1
            if self.effects_left < 0:
                raise Killed

    def die(self, has_power: bool = True) -> None:
        """Ends without a message; without power, nobody learns of it."""
        if not self.is_alive:
            return
        self.clock.trace("die", self.name, has_power)
        self.is_alive, self.is_frozen, self.has_power, self.effects_left = False, False, has_power, None
        for task in self.tasks:
            task.is_over = True
        for socket in self.sockets:
            socket.close()
        self.died()

    def died(self) -> None:
        """Releases what the kernel would release."""

    def stop(self) -> None:
        """Ends in good order."""
        self.clock.trace("stop", self.name)
        self.effects_left = None
        self.main.execute(self.leave)
        self.die()

    def leave(self) -> None:
        raise NotImplementedError

    def freeze(self, is_frozen: bool) -> None:
        self.clock.trace("freeze", self.name, is_frozen)
        self.is_frozen = is_frozen
        for task in self.tasks:
            task.wake()


class ClientThread:
    """In place of a client's thread; `join` ends it as the loop of `LinkClient` ends."""

    def __init__(self, process: Process, client: LinkClient, connect: Any) -> None:
        self._client = client
        self.task = process.task(self._turn, 0.9)  # less than STOOD_STILL_SECONDS of a connection
        self.task.execute(partial(self._open, connect))
        self.task.wake()

    def _open(self, connect: Any) -> None:
        self._opened = self._client._connection.open(connect, self._client._fail)
        self._socket = self._opened.__enter__()
        if (wake := getattr(self._client, "_wake", None)) is not None:
            wake.socket.task = self.task

    def _turn(self, now: float) -> float | None:
        try:
            self._client.turn(now)
        except Exception:
            self.task.is_over = True
            self._opened.__exit__(*sys.exc_info())  # passes a RunError to the client, and raises others
        return None

    def join(self) -> None:
        if not self.task.is_over:
            self.task.is_over = True
            self._client._leave(self._socket)
            self._opened.__exit__(None, None, None)


class ServerThread:
    """In place of the thread of `WeightsServer`."""

    def __init__(self, target: Any, name: str) -> None:
        self._server: Any = target.__self__  # a WeightsServer

    def start(self) -> None:
        clock = self._server._socket.clock
        assert clock.task is not None
        self.task = clock.task.process.task(self._turn, 1.0)
        self._server._socket.task = self._server._wake.socket.task = self.task
        self.task.wake()

    def _turn(self, now: float) -> float | None:
        self._server.turn(now)
        return 0.001 if self._server._socket.turns else None

    def join(self) -> None:
        self.task.is_over = True
        self._server._socket.close()


class SimEvent:
    """In place of the events of the learner's end of the sampling link, for which the learner waits."""

    def __init__(self, clock: Clock) -> None:
        assert clock.task is not None
        self._process, self._is_set = clock.task.process, False

    def set(self) -> None:
        self._is_set = True
        self._process.main.wake()

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        self._is_set = False


class InOrder(dict[bytes, None]):
    """A set with the order of its insertions, which does not depend on the hashes of this Python process."""

    def add(self, item: bytes) -> None:
        self[item] = None

    def remove(self, item: bytes) -> None:
        del self[item]


def start_client(client: LinkClient, connect: Any, name: str, clock: Clock) -> None:
    """In place of `LinkClient._start`."""
    assert clock.task is not None
    client._thread = ClientThread(clock.task.process, client, connect)  # type: ignore[assignment]
