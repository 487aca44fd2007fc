"""What must hold while a fleet is broken on purpose: it advances, stays small, and does not unlearn."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from apex_jax.metrics import MetricsFollower
from tests.fleet import role_of
from tests.processes import Program

PAGE_BYTES = 4096
STEADY_SECONDS = 20.0  # after its first line of metrics a process has compiled and filled what it will
RANDOM_RETURN = -0.6  # of random play of Catch
SUCCESS_RETURN = 0.8
LEARNING_WINDOW_SECONDS = 60.0
LEAST_LEVEL = 0.3  # of the way from random play to success that the mean of a window may fall to


class Sample(NamedTuple):
    """What a process holds at a moment of its life."""

    age_seconds: float
    memory_bytes: int
    fds: int
    threads: int


@dataclass
class Life:
    """One process of a name, from its start to its end."""

    name: str
    number: int
    program: Program
    started_seconds: float = field(default_factory=time.monotonic)
    ended_seconds: float | None = None
    ended_by: str = ""  # what the harness sent, where it did
    samples: list[Sample] = field(default_factory=list)
    metrics: Path = Path()  # where it writes, as those of its name before did
    working_seconds: float = float("inf")  # its age when it first wrote

    def __post_init__(self) -> None:
        self._size_before = self._size()

    @property
    def age_seconds(self) -> float:
        return (self.ended_seconds or time.monotonic()) - self.started_seconds

    def take_sample(self) -> None:
        folder = Path("/proc", str(self.program.process.pid))
        try:
            memory_bytes = int((folder / "statm").read_text().split()[1]) * PAGE_BYTES
            fds, threads = len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir()))
        except (OSError, IndexError):  # ended just now
            return
        if self.working_seconds == float("inf") and self._size() > self._size_before:
            self.working_seconds = self.age_seconds
        self.samples.append(Sample(self.age_seconds, memory_bytes, fds, threads))

    def steady_samples(self) -> list[Sample]:
        """Returns those of the time after everything had been set up."""
        steady_seconds = self.working_seconds + STEADY_SECONDS
        return [sample for sample in self.samples if sample.age_seconds > steady_seconds]

    def _size(self) -> int:
        return self.metrics.stat().st_size if self.metrics.is_file() else 0


class Level(NamedTuple):
    """What a process holds over a part of its life: medians."""

    memory_bytes: float
    fds: float
    threads: float


def level_of(samples: list[Sample]) -> Level:
    """Returns the medians of at least one sample."""
    return Level(*(statistics.median(values) for values in list(zip(*samples, strict=True))[1:]))


class Limits(NamedTuple):
    """How much more than before a process may hold."""

    memory_share: float = 1.5
    memory_bytes: float = 64 * 2**20
    fds: float = 24
    threads: float = 4

    def exceeded(self, before: Level, after: Level) -> list[str]:
        excess = [
            f"memory {before.memory_bytes / 2**20:.0f} -> {after.memory_bytes / 2**20:.0f} MiB"
            if after.memory_bytes > self.memory_share * before.memory_bytes + self.memory_bytes
            else "",
            f"fds {before.fds:g} -> {after.fds:g}" if after.fds > before.fds + self.fds else "",
            f"threads {before.threads:g} -> {after.threads:g}" if after.threads > before.threads + self.threads else "",
        ]
        return [text for text in excess if text]


def growth(lives: list[Life], limits: Limits) -> list[str]:
    """Returns a line for each process that grew during its life, or beyond the smallest of its name."""
    lines = []
    settled: dict[str, dict[int, Level]] = defaultdict(dict)
    for life in lives:
        steady = life.steady_samples()
        if len(steady) < 6:
            continue
        third = len(steady) // 3
        first, last = level_of(steady[:third]), level_of(steady[-third:])
        lines += [f"{life.name}, life {life.number}, grew: {text}" for text in limits.exceeded(first, last)]
        settled[role_of(life.name)][life.number] = last
    for role, levels in settled.items():
        least = Level(*(min(values) for values in zip(*levels.values(), strict=True)))
        for number, level in levels.items():
            lines += [
                f"{role}, life {number}, is larger than another: {text}" for text in limits.exceeded(least, level)
            ]
    return lines


class Advance:
    """A count that falls where a process restarts, and must grow again within the window."""

    def __init__(self, path: Path, tag: str) -> None:
        self.total = 0.0
        self.longest_gap_seconds = 0.0
        self._follower = MetricsFollower(path)
        self._tag = tag
        self._last: float | None = None
        self._advanced_seconds = time.monotonic()

    def begin(self) -> None:
        """Forgets how long it took to begin."""
        self.longest_gap_seconds = 0.0
        self._advanced_seconds = time.monotonic()

    @property
    def gap_seconds(self) -> float:
        """Returns how long ago it grew."""
        return time.monotonic() - self._advanced_seconds

    def read(self) -> None:
        for line in self._follower.read_new():
            value = line.get(self._tag)
            if value is None:
                continue
            if self._last is not None and value > self._last:
                self.total += value - self._last
                self.longest_gap_seconds = max(self.longest_gap_seconds, self.gap_seconds)
                self._advanced_seconds = time.monotonic()
            self._last = value
        self.longest_gap_seconds = max(self.longest_gap_seconds, self.gap_seconds)


class Learning:
    """The evaluator's results, which must not fall back once the game is mastered."""

    def __init__(self, path: Path) -> None:
        self.returns: list[tuple[float, float]] = []  # (seconds since the start, mean return)
        self._follower = MetricsFollower(path)
        self._started = time.monotonic()

    def read(self) -> None:
        now = time.monotonic() - self._started
        lines = self._follower.read_new()
        self.returns += [(now, value) for line in lines if (value := line.get("eval/episodic_return")) is not None]

    @property
    def mastered_seconds(self) -> float | None:
        """Returns when the game was first mastered."""
        return next((seconds for seconds, value in self.returns if value >= SUCCESS_RETURN), None)

    def window_means(self) -> list[float]:
        """Returns the mean of each window since then in which there were evaluations."""
        if (since := self.mastered_seconds) is None:
            return []
        windows: dict[int, list[float]] = defaultdict(list)
        for seconds, value in self.returns:
            if seconds >= since:
                windows[int((seconds - since) / LEARNING_WINDOW_SECONDS)].append(value)
        return [statistics.fmean(values) for values in windows.values()]

    def relapses(self) -> list[str]:
        """Returns a line for each window whose mean is nearer to random play than to success."""
        least = RANDOM_RETURN + LEAST_LEVEL * (SUCCESS_RETURN - RANDOM_RETURN)
        if self.mastered_seconds is None:
            return [f"the game was never mastered: best {max((value for _, value in self.returns), default=None)}"]
        return [
            f"the mean return of minute {number} after success is {mean:.2f}, must be at least {least:.2f}"
            for number, mean in enumerate(self.window_means())
            if mean < least
        ]
