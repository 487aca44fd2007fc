"""Simulates fleets under a virtual clock: `python -m tests.simulation --hours 200 --seed 1`.

Each seed is one fleet for one hour; the next hour is that of the next seed. A seed that violates an invariant is
printed with the command that repeats it exactly and the newest events; the program then ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.simulation.clock import START_SECONDS
from tests.simulation.fleet import Fleet

SHOWN_EVENTS = 40


class Outcome(NamedTuple):
    """The simulation of one seed."""

    seed: int
    hours: float  # of virtual time
    events: int
    digest: str  # of all events
    updates: int
    stored: int  # segments
    violation: str  # empty if there is none
    recent: tuple[str, ...]  # newest events

    @property
    def command(self) -> str:
        return f"python -m tests.simulation --hours 1 --seed {self.seed}"


def simulate(seed: int, hours: float) -> Outcome:
    """Runs the fleet of a seed until the first violation."""
    memory, violation = Path("/dev/shm"), ""
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=memory if memory.is_dir() else None) as directory:
        fleet = Fleet(seed, Path(directory))
        try:
            fleet.run(hours)
        except Exception as error:  # of the product, too: no fault may raise one
            violation = f"{type(error).__name__}: {error}"
    return Outcome(
        seed,
        (fleet.clock.now - START_SECONDS) / 3600,
        fleet.clock.events,
        fleet.clock.digest,
        fleet.oracle.updates,
        len(fleet.oracle.books.log),
        violation,
        tuple(fleet.clock.recent)[-SHOWN_EVENTS:],
    )


def report(outcome: Outcome) -> str:
    """Returns what a reader needs to find the cause of a violation."""
    when = f"after {3600 * outcome.hours:.3f} s of virtual time, {outcome.events} events (digest {outcome.digest})"
    return "\n".join([*outcome.recent, f"seed {outcome.seed}: {outcome.violation}", when, f"repeat: {outcome.command}"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0, help="of virtual time, all fleets together")
    parser.add_argument("--seed", type=int, default=1, help="of the first fleet")
    parser.add_argument("--minutes", type=float, default=0.0, help="end after so many minutes of real time; 0 = never")
    options = parser.parse_args(arguments)
    started, seed, hours, events = time.monotonic(), options.seed, 0.0, 0
    while hours < options.hours:
        outcome = simulate(seed, min(1.0, options.hours - hours))
        hours, events, seed = hours + outcome.hours, events + outcome.events, seed + 1
        if outcome.violation:
            print(report(outcome), file=sys.stderr)
            return 1
        seconds = time.monotonic() - started
        print(
            json.dumps(
                {
                    **{name: getattr(outcome, name) for name in ("seed", "events", "digest", "updates", "stored")},
                    "hours": round(hours, 2),
                    "seconds": round(seconds, 1),
                    "cpu_seconds": round(time.process_time(), 1),
                    "hours_per_minute": round(60 * hours / seconds, 2),
                }
            ),
            flush=True,
        )
        if 0 < 60 * options.minutes < seconds:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
