"""A fleet in which something breaks every 10 to 30 s: `python -m benchmarks.chaos --minutes 30 --seed 1`.

A replay server, a learner, three actors and an evaluator, real processes with keys over loopback tcp with a proxy at
every client; what ends is started again after a second, as systemd would. One of them is killed, terminated, stopped
for a while, cut off for a while, or has its connections reset or lost: each process once in about 18 minutes, in the
same order for the same seed. Updates and frames must advance, processes may not grow, and at the end the ledger must
agree with what actors and replay counted, and the last policy must play well. Exit code 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apex_jax.run.metrics import MetricsFollower
from apex_jax.transport import keys
from benchmarks.report import finish, say, target
from tests.rigs.fleet import Fleet, ledger_violations
from tests.rigs.processes import Program, Programs, Resources, resources_of

ACTORS = ("actor-0", "actor-1", "actor-2")
NAMES = ("replay", "learner", *ACTORS, "evaluator")
KINDS = ("SIGKILL", "SIGTERM", "SIGSTOP", "partition", "reset", "lose")
PAUSE_SECONDS = (10.0, 30.0)  # between two faults
LASTS_SECONDS = (5.0, 20.0)  # of SIGSTOP and partition
RESTART_SECONDS = 1.0
PROGRESS_SECONDS = 90.0  # in which there must be updates and frames
START_SECONDS = 180.0
LEAVE_SECONDS = 60.0  # from SIGTERM to the end; 2 s where nobody else uses the machine
YOUNG_SECONDS = 20.0  # in which Python may not have installed the handler of SIGTERM
CALM_SECONDS = 20.0  # after the last fault
TICK_SECONDS = 0.25
SAMPLE_SECONDS = 2.0
STEADY_SECONDS = 60.0  # after its start, a process has compiled and filled what it will
LEAST_SAMPLES = 6
GROWTH = Resources(memory_bytes=32 * 2**20, fds=4, threads=1)  # allowed in a life; a replay that fills needs 4 MB
GOOD_RETURN = 0.5  # of Catch; random play has -0.6
ARGUMENTS = ("learner.checkpoint_interval_seconds=5", "evaluator.interval_seconds=2", "metrics_interval_seconds=1")


@dataclass
class Life:
    """One process, from its start to its end."""

    name: str
    program: Program
    started_seconds: float = field(default_factory=time.monotonic)
    ended_by: str = ""  # signal that should end it, if one was sent
    asked_seconds: float = float("inf")  # time of this signal
    over_seconds: float | None = None  # time at which its end was seen
    held_open: int = 0  # lost connections to this server, which the proxy holds open
    samples: list[Resources] = field(default_factory=list)  # once it is steady

    def end_by(self, kind: str) -> None:
        """Sends a signal that should end it."""
        self.ended_by, self.asked_seconds = kind, time.monotonic()
        self.program.send(signal.Signals[kind])

    def wrong_end(self) -> list[str]:
        """Returns what is wrong with the exit code and the log of a process that has ended."""
        is_young = time.monotonic() - self.started_seconds < YOUNG_SECONDS
        number = signal.Signals[self.ended_by] if self.ended_by else 0
        expected = {128 + number, *([-number] if is_young else [])} if self.ended_by == "SIGTERM" else {-number}
        code, stderr = self.program.process.returncode, self.program.stderr
        lines = [f"{self.name} wrote a traceback: {stderr[-1500:]}"] if "Traceback" in stderr else []
        if not number or code not in expected:
            lines.append(f"{self.name} ended by {self.ended_by or 'itself'} with exit code {code}: {stderr[-600:]}")
        return lines

    def growth(self) -> list[str]:
        """Returns what has grown between the first and the last third of its steady time, by medians."""
        third = len(self.samples) // 3
        if len(self.samples) < LEAST_SAMPLES:
            return []
        first, last = (
            [statistics.median(values) for values in zip(*samples, strict=True)]
            for samples in (self.samples[:third], self.samples[-third:])
        )
        most = GROWTH._replace(fds=GROWTH.fds + self.held_open)
        rows = zip(Resources._fields, first, last, most, strict=True)
        return [f"{self.name} grew: {what} {a:,.0f} -> {b:,.0f}" for what, a, b, limit in rows if b > a + limit]


class Count:
    """A count in the metrics of a process, which falls at each restart of the process."""

    def __init__(self, path: Path, tag: str) -> None:
        self.total = 0.0
        self._tag, self._follower, self._last = tag, MetricsFollower(path), float("inf")
        self.watch()

    def watch(self) -> None:
        """Begins to measure the longest time without growth."""
        self.longest_pause_seconds, self._grown_seconds = 0.0, time.monotonic()

    def read(self) -> float:
        """Reads new metrics; returns the seconds since the count has grown."""
        for value in (line[self._tag] for line in self._follower.read_new() if line.get(self._tag) is not None):
            if value > self._last:
                self.total += value - self._last
                self._grown_seconds = time.monotonic()
            self._last = value
        pause_seconds = time.monotonic() - self._grown_seconds
        self.longest_pause_seconds = max(self.longest_pause_seconds, pause_seconds)
        return pause_seconds


class Soak:
    """A fleet, its faults, and what went wrong."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self.fleet, self.rng = fleet, rng
        self.lives: list[Life] = []
        self.newest: dict[str, Life] = {}
        self.faults: Counter[str] = Counter()
        self.violations: list[str] = []
        metrics = fleet.directory / "metrics"
        self.counts = {
            "updates": Count(metrics / "learner.jsonl", "learner/updates"),
            "frames": Count(metrics / "replay.jsonl", "step"),
        }
        self._recoveries: list[tuple[float, str, Callable[[], None]]] = []  # when, whose, how
        self._pairs_left: list[tuple[str, str]] = []
        self._next_sample_seconds = 0.0

    def run(self, seconds: float) -> None:
        """Starts the fleet, injects faults for this long, lets it settle, and ends it."""
        for name in NAMES:
            self.fleet.all_proxies(name)
        for name in NAMES:
            self._start(name)
        self._tick_until(lambda: self.counts["updates"].total > 0, START_SECONDS, "learning has not begun")
        for count in self.counts.values():
            count.watch()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tick_for(self.rng.uniform(*PAUSE_SECONDS))
            self._break_something()
        self._recover(float("inf"))
        self._tick_for(CALM_SECONDS)
        before = {what: count.total for what, count in self.counts.items()}
        self._tick_until(
            lambda: all(count.total > before[what] for what, count in self.counts.items()),
            PROGRESS_SECONDS,
            "after the last fault updates and frames do not advance",
        )
        self._tick_until(lambda: self.fleet.actors() == len(ACTORS), PROGRESS_SECONDS, "at the end an actor is missing")
        self._leave(ACTORS)  # so that the replay receives all that they have made
        until = time.monotonic() + PROGRESS_SECONDS
        while time.monotonic() < until and self.fleet.actors():
            time.sleep(TICK_SECONDS)
        self._leave(name for name in NAMES if name not in ACTORS)
        self.violations += [line for life in self.lives for line in life.growth()]
        self.violations += ledger_violations(self.fleet.directory, {name: self.newest[name].program for name in ACTORS})

    def _start(self, name: str) -> None:
        self.newest[name] = Life(name, self.fleet.start(name))
        self.lives.append(self.newest[name])

    def _tick_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tick()

    def _tick_until(self, condition: Callable[[], bool], seconds: float, violation: str) -> None:
        """Keeps the fleet alive until the condition is true; it is a violation if that takes longer than `seconds`."""
        until = time.monotonic() + seconds
        while not condition():
            self._tick()
            if time.monotonic() > until:
                self.violations.append(violation)
                return

    def _tick(self) -> None:
        now = time.monotonic()
        for life in list(self.newest.values()):
            self._keep_alive(life, now)
        self._recover(now)
        if now >= self._next_sample_seconds:
            self._next_sample_seconds = now + SAMPLE_SECONDS
            for life in self.newest.values():
                if now > life.started_seconds + STEADY_SECONDS and (found := resources_of(life.program.process.pid)):
                    life.samples.append(found)
        for what, count in self.counts.items():
            line = f"no {what} for {PROGRESS_SECONDS:g} s"
            if count.read() > PROGRESS_SECONDS and count.total > 0 and line not in self.violations:
                self.violations.append(line)
        time.sleep(TICK_SECONDS)

    def _keep_alive(self, life: Life, now: float) -> None:
        if life.over_seconds is not None:
            if now > life.over_seconds + RESTART_SECONDS:
                self._start(life.name)
        elif life.program.process.poll() is not None:
            life.over_seconds = now
            self.violations += life.wrong_end()
        elif life.ended_by == "SIGTERM" and now > life.asked_seconds + LEAVE_SECONDS:
            self._abort(life)

    def _abort(self, life: Life) -> None:
        """Ends a process that SIGTERM has not ended, after it has printed the stacks of its threads."""
        life.end_by("SIGABRT")
        life.program.process.wait(LEAVE_SECONDS)
        stacks = life.program.stderr[-4000:]
        self.violations.append(f"{life.name} had not ended {LEAVE_SECONDS:g} s after SIGTERM: {stacks}")

    def _leave(self, names: Iterable[str]) -> None:
        lives = [self.newest[name] for name in names]
        for life in lives:
            life.end_by("SIGTERM")
        for life in lives:
            try:
                life.program.process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self._abort(life)
            self.violations += life.wrong_end()

    def _recover(self, now: float) -> None:
        due = [entry for entry in self._recoveries if entry[0] <= now]
        self._recoveries = [entry for entry in self._recoveries if entry[0] > now]
        for _, _, recover in due:
            recover()

    def _break_something(self) -> None:
        """Injects the next fault into a process that can be broken now; all pairs come before one is repeated."""
        if not self._pairs_left:
            pairs = [(name, kind) for name in NAMES for kind in KINDS]
            self._pairs_left = self.rng.sample(pairs, len(pairs))
        until = time.monotonic() + self.rng.uniform(*LASTS_SECONDS)
        afflicted = {name for _, name, _ in self._recoveries}
        afflicted |= {life.name for life in self.newest.values() if life.over_seconds is not None or life.ended_by}
        name, kind = next((pair for pair in self._pairs_left if pair[0] not in afflicted), ("", ""))
        if not name:
            return
        self._pairs_left.remove((name, kind))
        self.faults[kind] += 1
        say(f"{kind} {name}")
        life = self.newest[name]
        if kind in ("SIGKILL", "SIGTERM"):
            life.end_by(kind)
        elif kind == "SIGSTOP":
            life.program.send(signal.SIGSTOP)
            self._recoveries.append((until, name, lambda: life.program.send(signal.SIGCONT)))
        else:
            self._break_connections(name, kind, until)

    def _break_connections(self, name: str, kind: str, until: float) -> None:
        """Breaks all connections between a process and the others."""
        for (client, link), proxy in self.fleet.proxies.items():
            server = "learner" if link == "weights" else "replay"
            if name not in (client, server):
                continue
            if kind == "partition":
                proxy.stop()
                self._recoveries.append((until, name, proxy.heal))
            elif kind == "reset":
                proxy.reset()
            else:
                proxy.lose()
                self.newest[server].held_open += 1


def soak(folder: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Runs a soak in an empty folder and returns its figures, with an empty `violations` if everything held."""
    os.environ["PYTHONFAULTHANDLER"] = "1"  # see `Soak._abort`
    keys.create(folder / "keys")
    arguments = (*ARGUMENTS, f"security.keys={folder / 'keys'}")
    with Programs(folder) as programs, Fleet(programs, folder / "run", *arguments) as fleet:
        soak = Soak(fleet, random.Random(seed))
        soak.run(60 * minutes)
        soak.violations += [f"{name} was left (process {pid})" for name, pid in programs.living().items()]
        play = ("--role", "evaluator", f"checkpoint={fleet.directory}", "episodes=100")
        last = programs.start("--config", "catch", *play)
        played = re.search(r"mean return (-?[\d.]+)", last.stdout) if last.exit_code(120) == 0 else None
        if played is None or float(played[1]) < GOOD_RETURN:
            soak.violations.append(f"the last policy does not play well: {last.stdout}{last.stderr}")
        return {
            "minutes": minutes,
            "seed": seed,
            "faults": dict(soak.faults),
            "lives": len(soak.lives),
            "dropped": fleet.dropped(),
            **{what: count.total for what, count in soak.counts.items()},
            **{f"longest pause in {what}, s": count.longest_pause_seconds for what, count in soak.counts.items()},
            "violations": soak.violations,
        }


def main() -> None:
    """Runs the fleet with its faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="empty folder for logs and metrics, which are otherwise removed")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="apex-jax-chaos-") as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = soak(folder, chosen.minutes, chosen.seed)
    finish("chaos", figures, {"violations": target(len(figures["violations"]), at_most=0)})
    sys.exit(bool(figures["violations"]))


if __name__ == "__main__":
    main()
