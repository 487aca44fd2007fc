"""How every benchmark times functions and reports: lines of progress, then one JSON object as the last line."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("cpprb", "envpool", "flax", "jax", "jaxlib", "numba", "numpy", "optax", "pyzmq", "zstandard")

_start_seconds = time.monotonic()


def peer(package: str) -> Any:
    """Imports a package that a benchmark compares with; exits with a message of one line if it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        sys.exit(f"{package} is not installed: see requirements-dev.txt and benchmarks/requirements.txt")


def say(text: str) -> None:
    """Prints a line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _start_seconds:6.1f} s] {text}", flush=True)


def target(measured: float, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    """Returns a measured figure, its bounds, and whether it is within them."""
    met = (at_least is None or measured >= at_least) and (at_most is None or measured <= at_most)
    bounds = {"at_least": at_least, "at_most": at_most}
    return {"measured": rounded(measured), **{k: v for k, v in bounds.items() if v is not None}, "met": met}


def finish(benchmark: str, figures: dict[str, Any], targets: dict[str, Any]) -> None:
    """Prints the last line: figures, targets, versions and machine."""
    report = {
        "benchmark": benchmark,
        "targets": targets,
        "figures": rounded(figures),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(report), flush=True)


def rounded(value: Any) -> Any:
    """Rounds every float in a tree of dicts and lists to four significant digits, because further ones are noise."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def machine() -> dict[str, Any]:
    """Returns the properties of this machine on which the figures depend."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory_gib = rounded(memory_bytes / 2**30)
    return {"processor": model, "cores": os.cpu_count(), "memory_gib": memory_gib, "os": platform.system()}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of those PACKAGES that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def side_by_side(
    calls: Mapping[str, Callable[[], object]], seconds: float = 2.0, rounds: int = 9
) -> dict[str, list[float]]:
    """Times functions in turns, because a machine's speed drifts; returns the seconds per call, one figure per round.

    `seconds`: of all rounds of one function.
    """
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
