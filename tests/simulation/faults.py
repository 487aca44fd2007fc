"""What breaks, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MEAN_SECONDS = (3.0, 20.0)  # between two faults, by seed
AWAY_SECONDS = (2.0, 2.0, 2.0, 2.0, 15.0, 15.0, 15.0, 120.0)  # at most, until a process is started again
LOSSY = ("power", "full_disk", "damage")  # acknowledged segments may be lost, as the documentation says


class Faults:
    """Injects faults between `begin` and `end`."""

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet
        self._clock, self._rng = fleet.clock, fleet.clock.rng
        self._mean_seconds = self._rng.uniform(*MEAN_SECONDS)
        self._round = 0  # numbers what `begin` and `end` enclose; 0 = calm
        self._rounds = 0
        kinds = ("kill", "kill_in_turn", "vanish", "stop", "freeze", "stall", "cut", "partition", "slow", "wall")
        self.kinds = kinds + (LOSSY if self._rng.random() < 0.4 else ())
        self.is_lossy = "power" in self.kinds

    def begin(self) -> None:
        self._rounds += 1
        self._round = self._rounds
        self._next(self._round)

    def end(self) -> None:
        """Ends all faults that last."""
        fleet, self._round = self._fleet, 0
        fleet.network.heal()
        fleet.network.slowness.clear()
        fleet.disk.full_until.clear()
        for name in fleet.makers:
            fleet.start(name)
            fleet.processes[name].effects_left = None
            if fleet.processes[name].is_frozen:
                fleet.processes[name].freeze(False)

    def _next(self, number: int) -> None:
        self._clock.after(self._rng.expovariate(1 / self._mean_seconds), lambda: self._inject(number))

    def _inject(self, number: int) -> None:
        if self._round != number:
            return
        kind = self._rng.choice(self.kinds)
        self._clock.trace("fault", kind)
        act: Callable[[], None] = getattr(self, f"_{kind}")
        act()
        self._next(number)

    def _later(self, low: float, high: float, act: Callable[[], None]) -> None:
        """Calls `act` after a while, unless the calm has begun and has ended the fault."""
        number = self._round
        self._clock.after(self._rng.uniform(low, high), lambda: act() if self._round == number else None)

    def _any(self) -> Any:
        """A process that runs, or None."""
        names = [name for name in self._fleet.makers if self._fleet.processes[name].is_alive]
        return self._fleet.processes[self._rng.choice(names)] if names else None

    def _kill(self) -> None:
        if (process := self._any()) is not None:
            process.die()
            self._restart(process.name)

    def _kill_in_turn(self) -> None:
        if (process := self._any()) is not None:
            process.effects_left = self._rng.randrange(12)
            self._restart(process.name)

    def _vanish(self) -> None:
        """The host of a process that has no disk loses its power: its connections do not close."""
        process = self._any()
        if process is not None and not process.name.startswith("replay"):
            process.die(has_power=False)
            self._restart(process.name)

    def _restart(self, name: str) -> None:
        self._later(0.2, self._rng.choice(AWAY_SECONDS), lambda: self._start(name))

    def _start(self, name: str) -> None:
        process = self._fleet.processes[name]
        if process.effects_left is not None:  # it has done nothing meanwhile
            process.die()
        self._fleet.start(name)

    def _stop(self) -> None:
        process = self._any()
        if process is not None and not process.is_frozen:
            process.stop()
            self._restart(process.name)

    def _freeze(self) -> None:
        process = self._any()
        if process is not None and not process.is_frozen:
            process.freeze(True)
            self._later(0.2, self._rng.choice((2.0, 25.0)), lambda: process.is_alive and process.freeze(False))

    def _stall(self) -> None:
        """One thread gets no processor time, while ZMQ's own threads go on and may connect again."""
        if (process := self._any()) is not None:
            task = self._rng.choice(process.tasks)
            task.stalled_until = self._clock.now + self._rng.uniform(0.1, 8.0)

    def _cut(self) -> None:
        wires = list(self._fleet.network.wires.values())
        for wire in self._rng.sample(wires, min(len(wires), self._rng.randint(1, 4))):
            wire.lose(self._rng.randrange(2))

    def _partition(self) -> None:
        hosts = sorted({process.host for process in self._fleet.processes.values()})
        lone = self._rng.choice(hosts)
        others = [host for host in hosts if host != lone and self._rng.random() < 0.7]
        pairs = [(lone, host) for host in others] + [(host, lone) for host in others]
        if self._rng.random() < 0.3:
            pairs = pairs[: len(pairs) // 2]  # one direction only
        self._fleet.network.block(pairs)
        self._later(0.2, self._rng.choice((3.0, 30.0)), lambda: self._fleet.network.heal(pairs))

    def _slow(self) -> None:
        host, slowness = self._any_host(), self._fleet.network.slowness
        slowness[host] = self._rng.choice((30.0, 300.0, 2_000.0))
        self._later(1.0, 20.0, lambda: slowness.pop(host, None))

    def _any_host(self) -> str:
        return self._rng.choice(sorted({process.host for process in self._fleet.processes.values()}))

    def _wall(self) -> None:
        self._clock.wall_offset += self._rng.uniform(-100.0, 100.0)

    def _power(self) -> None:
        if replays := self._fleet.replays():
            process = self._rng.choice(replays)
            process.die(has_power=False)
            self._restart(process.name)

    def _full_disk(self) -> None:
        if replays := self._fleet.replays():
            host = self._rng.choice(replays).host
            self._fleet.disk.full_until[host] = self._clock.now + self._rng.uniform(0.5, 10.0)

    def _damage(self) -> None:
        self._fleet.network.damaged_segments += 1
