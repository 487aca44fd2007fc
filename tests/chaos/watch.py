"""The invariants of a fleet under faults: it advances, does not grow, and does not unlearn."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from apex_jax.run.metric_files import MetricsFollower
from tests.rigs.fleet import role_of
from tests.rigs.processes import Program, Resources, resources_of

STEADY_SECONDS = 20.0  # after its work has begun a process has compiled and filled what it will
RANDOM_RETURN = -0.6  # of random play of Catch
SUCCESS_RETURN = 0.8
LEARNING_WINDOW_SECONDS = 60.0
WORKS_ONCE_GROWS = {"learner": "learner/updates"}  # of the roles that write metrics before they have compiled
LEAST_SAMPLES = 6  # in which to look for growth
LEAST_LEVEL = 0.3  # of the way from random play to success that the mean of a window may fall to


@dataclass
class Life:
    """One process of a name, from its start to its end."""

    name: str
    number: int
    program: Program
    started_seconds: float = field(default_factory=time.monotonic)
    ended_seconds: float | None = None
    held_open: int = 0  # lost connections to this server, whose other end the proxy holds open
    ended_by: str = ""  # what the harness sent, where it did
    samples: list[tuple[float, Resources]] = field(default_factory=list)  # with the age in seconds
    metrics: Path = Path()  # where it writes, as those of its name before did
    working_seconds: float = float("inf")  # its age when it first wrote of work

    def __post_init__(self) -> None:
        self._follower = MetricsFollower(self.metrics)
        self._follower.read_new()  # those of before
        self._progress: list[float] = []

    @property
    def age_seconds(self) -> float:
        return (self.ended_seconds or time.monotonic()) - self.started_seconds

    def take_sample(self) -> None:
        if (resources := resources_of(self.program.process.pid)) is None:
            return
        if self.working_seconds == float("inf") and self._works():
            self.working_seconds = self.age_seconds
        self.samples.append((self.age_seconds, resources))

    def levels(self) -> tuple[Resources, Resources] | None:
        """Returns the medians of the first and of the last third after the set-up; None if it has ended too soon."""
        steady_seconds = self.working_seconds + STEADY_SECONDS
        steady = [resources for age_seconds, resources in self.samples if age_seconds > steady_seconds]
        third = len(steady) // 3
        return (medians(steady[:third]), medians(steady[-third:])) if len(steady) >= LEAST_SAMPLES else None

    def _works(self) -> bool:
        lines, tag = self._follower.read_new(), WORKS_ONCE_GROWS.get(role_of(self.name))
        if tag is None:
            return bool(lines)
        self._progress += [value for line in lines if (value := line.get(tag)) is not None]
        return bool(self._progress) and self._progress[-1] > self._progress[0]


def medians(samples: list[Resources]) -> Resources:
    """Returns the medians of at least one sample."""
    return Resources(*map(statistics.median, zip(*samples, strict=True)))


class Limits(NamedTuple):
    """Allowed growth of a process."""

    memory_share: float
    memory_bytes: float
    fds: float
    threads: float

    def exceeded(self, before: Resources, after: Resources) -> list[str]:
        most = (
            self.memory_share * before.memory_bytes + self.memory_bytes,
            before.fds + self.fds,
            before.threads + self.threads,
        )
        rows = zip(Resources._fields, before, after, most, strict=True)
        return [f"{name} {was:,.0f} -> {now:,.0f}" for name, was, now, limit in rows if now > limit]


# Within a life: no role legitimately needs more. A replay of Catch that still fills grows by 20,000 transitions of
# 200 bytes, 4 MB, and the medians of a third hide the connections that a fault has just doubled.
GROWTH = Limits(memory_share=1.05, memory_bytes=16 * 2**20, fds=4, threads=1)
# Between lives: one may have been restored, compiled anew or cut off for most of a short life.
SPREAD = Limits(memory_share=1.25, memory_bytes=32 * 2**20, fds=8, threads=2)


def growth(lives: list[Life]) -> list[str]:
    """Returns a line for each process that grew during its life, or is larger than the smallest of its role."""
    lines = []
    settled: dict[str, dict[str, Resources]] = defaultdict(dict)
    for life in lives:
        if (levels := life.levels()) is None:
            continue
        excess = GROWTH._replace(fds=GROWTH.fds + life.held_open).exceeded(*levels)
        lines += [f"{life.name}, life {life.number}, grew: {text}" for text in excess]
        settled[role_of(life.name)][f"{life.name}, life {life.number},"] = levels[1]
    for of_role in settled.values():
        least = Resources(*map(min, zip(*of_role.values(), strict=True)))
        for name, level in of_role.items():
            lines += [f"{name} is larger than another of its role: {text}" for text in SPREAD.exceeded(least, level)]
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
        """Resets the start time."""
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
