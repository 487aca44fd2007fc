"""The virtual clock: events in the order of their time, the random numbers of a seed, and the trace of events."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

START_SECONDS = 1_000.0
WALL_SECONDS = 1_700_000_000.0  # of the wall clock at the start
RECENT_LINES = 400


class Killed(BaseException):
    """The process that executes ends here, between two of its effects."""


class Violation(AssertionError):
    """An invariant does not hold."""


class Clock:
    """Virtual time. It replaces the module `time` in the modules of the links, and only `run` moves it."""

    def __init__(self, seed: int) -> None:
        self.now = START_SECONDS
        self.wall_offset = WALL_SECONDS - START_SECONDS
        self.rng = random.Random(seed)
        self.task: Task | None = None  # the one that executes
        self.recent: deque[str] = deque(maxlen=RECENT_LINES)  # the newest lines of the trace
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._pushed = 0
        self._digest = hashlib.blake2b(digest_size=8)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + self.wall_offset

    def reading_clock(self) -> float:
        """Time as a reading turn sees it: sometimes the turn is over after any message."""
        return self.now + (1.0 if self.rng.random() < 0.02 else 0.0)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Calls `act` at this time from now."""
        self._pushed += 1
        heapq.heappush(self._queue, (self.now + seconds, self._pushed, act))

    def between(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def trace(self, what: str, *details: Any) -> None:
        """Adds a line to the trace; two runs were the same if the digests of their traces are."""
        line = f"{self.now:.6f} {what} {' '.join(map(str, details))}"
        self._digest.update(line.encode())
        self.recent.append(line)
        self.events += 1

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def run(self, until: float) -> None:
        """Moves the clock to `until`, event by event."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, act = heapq.heappop(queue)
            act()
        self.now = until


class Task:
    """What one thread of a simulated process does: `turn` is called when woken, and after `idle` seconds at most."""

    def __init__(self, clock: Clock, process: Any, turn: Callable[[float], float | None], idle: float) -> None:
        """`turn`: of the time; may return in how many seconds it wants to be called again."""
        self._clock = clock
        self._turn = turn
        self._idle = idle
        self._due = float("inf")
        self.process = process
        self.is_over = False
        self.stalled_until = 0.0  # another thread has the processor

    def wake(self, seconds: float | None = None) -> None:
        """Has the turn called in so many seconds, by default a few milliseconds, or earlier."""
        clock = self._clock
        due = clock.now + (clock.between(0.0002, 0.004) if seconds is None else seconds)
        if due < self._due and not self.is_over:
            self._due = due
            clock.after(due - clock.now, lambda: self._run(due))

    def _run(self, due: float) -> None:
        if due != self._due or self.is_over:
            return
        self._due = float("inf")
        if self.process.is_frozen:
            return  # thawing wakes every task
        if self.stalled_until > self._clock.now:
            self.wake(self.stalled_until - self._clock.now)
            return
        again = self.execute(lambda: self._turn(self._clock.now))
        self.wake(again if again is not None else self._clock.between(0.6, 1.0) * self._idle)

    def execute(self, act: Callable[[], Any]) -> Any:
        """Calls `act` as this task; ends the process if it is killed meanwhile."""
        before, self._clock.task = self._clock.task, self
        try:
            return act()
        except Killed:
            self.process.die()
        finally:
            self._clock.task = before
        return None
