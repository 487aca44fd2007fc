"""Times functions in turns, because a machine's speed drifts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def side_by_side(
    calls: Mapping[str, Callable[[], object]], seconds: float = 2.0, rounds: int = 9
) -> dict[str, list[float]]:
    """Returns the seconds per call of each function, one figure per round; `seconds`: all rounds of one function."""
    repeats = {}
    for name, call in calls.items():
        call()  # compiles and fills caches
        took = _seconds_of(call, 3)
        repeats[name] = max(1, round(seconds / rounds / took))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_seconds_of(call, repeats[name]))
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Returns the median round of each function."""
    return {name: statistics.median(rounds) for name, rounds in times.items()}


def ratio(slow: list[float], fast: list[float]) -> float:
    """Returns how many times as long `slow` takes: the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def _seconds_of(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
