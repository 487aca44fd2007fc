"""Injects random faults into a fleet: `python -m tests.chaos --minutes 30 --seed 1`.

A replay server, a learner, three actors and an evaluator, real processes with keys over loopback tcp with a proxy at
every client; whatever ends is started again after a second, as systemd would. Every 10 to 30 s one of them is killed,
terminated, stopped for a while, cut off for a while, or has its connections reset or lost, each of which befalls each
process once in about 18 minutes; the same order for the same seed. Prints a line of JSON; exit code 1 if something
that must hold did not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apex_jax.run.metric_files import read_metrics
from apex_jax.transport import keys
from tests.chaos.ledger import ledger_violations, newest_ledger, read_books
from tests.chaos.watch import Advance, Learning, Life, growth
from tests.rigs.fleet import Fleet, role_of
from tests.rigs.processes import ROOT, Programs, catch
from tests.rigs.proxy import Proxy

NAMES = ("replay", "learner", "actor-0", "actor-1", "actor-2", "evaluator")
KINDS = ("SIGKILL", "SIGTERM", "SIGSTOP", "partition", "reset", "lose")
PAUSE_SECONDS = (10.0, 30.0)  # between two faults
LASTS_SECONDS = (5.0, 20.0)  # being stopped, or cut off
RESTART_SECONDS = 1.0
PROGRESS_SECONDS = 90.0  # in which there must be updates and frames
START_SECONDS = 180.0
LEAVE_SECONDS = 60.0  # from SIGTERM to the end; 2 s where nobody else uses the machine
CALM_SECONDS = 20.0  # at the end, in which everything that was broken must work again
TICK_SECONDS = 0.25
SAMPLE_SECONDS = 2.0
ARGUMENTS = ("learner.checkpoint_interval_seconds=5", "evaluator.interval_seconds=2", "metrics_interval_seconds=1")


@dataclass
class Soak:
    """A fleet, its harness, and what went wrong."""

    fleet: Fleet
    rng: random.Random
    started: float = field(default_factory=time.monotonic)
    lives: dict[str, Life] = field(default_factory=dict)  # of the processes of now
    ended: list[Life] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)  # name and kind
    violations: list[str] = field(default_factory=list)
    recoveries: list[tuple[float, str, Callable[[], None]]] = field(default_factory=list)  # when, whose, how

    def __post_init__(self) -> None:
        metrics = self.fleet.directory / "metrics"
        self.names = NAMES
        self.updates = Advance(metrics / "learner.jsonl", "learner/updates")
        self.frames = Advance(metrics / "replay.jsonl", "step")
        self.learning = Learning(metrics / "evaluator.jsonl")
        self.longest_leave_seconds = 0.0  # of the end of the soak
        self._has_begun = False
        self._next_sample = 0.0
        self._restart_at: dict[str, float] = {}
        self._pause = threading.Event()
        self._pairs = [(name, kind) for name in self.names for kind in KINDS]
        self._pairs_left: list[tuple[str, str]] = []
        for name in NAMES:
            self.fleet.all_proxies(name)

    @property
    def now(self) -> float:
        return time.monotonic() - self.started

    def run(self, seconds: float) -> None:
        """Starts the fleet, injects faults for this long, and lets it settle."""
        for name in self.names:
            self._start(name)
        self._tick_until(lambda: self.updates.total > 0, START_SECONDS, "learning has not begun")
        self._has_begun = True
        self.updates.begin()
        self.frames.begin()
        until, next_fault = self.now + seconds, self.now + self.rng.uniform(*PAUSE_SECONDS)
        while self.now < until:
            self._tick()
            if self.now >= next_fault:
                self._break_something()
                next_fault = self.now + self.rng.uniform(*PAUSE_SECONDS)
        for _, _, recover in self.recoveries:
            recover()
        self.recoveries.clear()
        self._tick_until(lambda: False, CALM_SECONDS, "")
        before = (self.updates.total, self.frames.total)
        self._tick_until(
            lambda: self.updates.total > before[0] and self.frames.total > before[1],
            PROGRESS_SECONDS,
            "after the last fault updates and frames do not advance",
        )
        self._tick_until(
            lambda: self.fleet.actors() == 3, PROGRESS_SECONDS, "after the last fault not all actors are back"
        )

    def end(self) -> None:
        """Sends SIGTERM to the actors and, once the replay has their segments, to the learner and the rest."""
        actors = [name for name in self.names if role_of(name) == "actor"]
        self._leave(actors)
        until = time.monotonic() + PROGRESS_SECONDS
        while time.monotonic() < until and self.fleet.actors():
            self._pause.wait(TICK_SECONDS)
        self._leave(["learner", *(name for name in self.names if name not in (*actors, "learner"))])

    def _leave(self, names: Sequence[str]) -> None:
        for name in names:
            life = self.lives[name]
            if life.program.process.poll() is None:
                life.ended_by = life.ended_by or "SIGTERM"
                life.program.send(signal.SIGTERM)
        asked = time.monotonic()
        for life in map(self.lives.__getitem__, names):
            try:
                life.program.process.wait(max(0.1, asked + LEAVE_SECONDS - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._make_end(life)
            self.longest_leave_seconds = max(self.longest_leave_seconds, time.monotonic() - asked)
            self._bury(life)

    def _tick(self) -> None:
        for name in self.names:
            self._keep_alive(name)
        for when, name, recover in [*self.recoveries]:
            if self.now >= when:
                recover()
                self.recoveries.remove((when, name, recover))
        if self.now >= self._next_sample:
            for life in self.lives.values():
                life.take_sample()
            self._next_sample = self.now + SAMPLE_SECONDS
        self.learning.read()
        for what, advance in (("updates", self.updates), ("frames", self.frames)):
            advance.read()
            if (
                self._has_begun
                and advance.gap_seconds > PROGRESS_SECONDS
                and not any(what in line for line in self.violations)
            ):
                self.violations.append(f"no {what} for {PROGRESS_SECONDS:g} s until {self.now:.0f} s")
        self._pause.wait(TICK_SECONDS)

    def _tick_until(self, condition: Callable[[], bool], seconds: float, violation: str) -> None:
        until = self.now + seconds
        while not condition():
            self._tick()
            if self.now > until:
                if violation:
                    self.violations.append(violation)
                return

    def _start(self, name: str) -> None:
        self.fleet.start(name)
        number = 1 + sum(life.name == name for life in self.ended)
        metrics = self.fleet.directory / "metrics" / f"{name}.jsonl"
        self.lives[name] = Life(name, number, self.fleet.running[name], metrics=metrics)

    def _keep_alive(self, name: str) -> None:
        life = self.lives[name]
        if life.ended_seconds is None and life.program.process.poll() is not None:
            self._bury(life)
            self._restart_at[name] = self.now + RESTART_SECONDS
        elif life.ended_seconds is not None and self.now >= self._restart_at[name]:
            self.ended.append(life)
            self._start(name)
        elif life.ended_by == "SIGTERM" and self.now > self._restart_at.get(f"{name} must leave", float("inf")):
            self._make_end(life)

    def _make_end(self, life: Life) -> None:
        """Kills a process that does not end, after it has dumped the stacks of its threads."""
        life.program.send(signal.SIGABRT)
        life.program.process.wait(LEAVE_SECONDS)
        threads = life.program.stderr[-4000:]
        self.violations.append(f"{life.name} had not ended {LEAVE_SECONDS:g} s after SIGTERM: {threads}")
        life.ended_by = "SIGABRT"

    def _bury(self, life: Life) -> None:
        """Records the end of a process, and whether its exit code is right."""
        life.ended_seconds = time.monotonic()
        self._restart_at.pop(f"{life.name} must leave", None)
        code, stderr = life.program.process.returncode, life.program.stderr
        expected: tuple[int, ...] = {
            "SIGKILL": (-signal.SIGKILL,),
            "SIGABRT": (-signal.SIGABRT,),
            "SIGTERM": (128 + signal.SIGTERM,),
        }.get(life.ended_by, ())
        if life.age_seconds < 20:  # Python had not yet begun to listen
            expected += (-signal.SIGTERM,)
        if code not in expected:
            how = f"after {life.ended_by}" if life.ended_by else "by itself"
            self.violations.append(
                f"{life.name}, life {life.number}, ended {how} with exit code {code}: {stderr[-600:]}"
            )
        if "Traceback" in stderr:
            self.violations.append(f"{life.name}, life {life.number}, wrote a traceback: {stderr[-1500:]}")

    def _break_something(self) -> None:
        """Injects the next fault into a process that can be broken now; all pairs come before one is repeated."""
        lasts = round(self.rng.uniform(*LASTS_SECONDS), 1)
        if not self._pairs_left:
            self._pairs_left = self.rng.sample(self._pairs, len(self._pairs))
        able = [pair for pair in self._pairs_left if self._can_break(pair[0])]
        if not able:
            return
        self._pairs_left.remove(able[0])
        name, kind = able[0]
        life, served = self.lives[name], self._proxies_of(name)
        proxies = [proxy for _, proxy in served]
        if kind in ("SIGKILL", "SIGTERM"):
            life.ended_by = kind
            life.program.send(signal.Signals[kind])
            if kind == "SIGTERM":
                self._restart_at[f"{name} must leave"] = self.now + LEAVE_SECONDS
        elif kind == "SIGSTOP":
            life.program.send(signal.SIGSTOP)
            self.recoveries.append((self.now + lasts, name, lambda: life.program.send(signal.SIGCONT)))
        elif kind == "partition":
            for proxy in proxies:
                proxy.stop()
            self.recoveries += [(self.now + lasts, name, proxy.heal) for proxy in proxies]
        else:
            for server, proxy in served:
                proxy.reset() if kind == "reset" else proxy.lose()
                self.lives[server].held_open += kind == "lose"
        self.faults.append((name, kind))
        print(
            f"{self.now:6.0f} s  {kind:9} {name:9} {lasts if kind in ('SIGSTOP', 'partition') else '':>4}", flush=True
        )

    def _can_break(self, name: str) -> bool:
        life = self.lives[name]
        is_afflicted = any(name == other for _, other, _ in self.recoveries)
        return not is_afflicted and life.ended_seconds is None and not life.ended_by

    def _proxies_of(self, name: str) -> list[tuple[str, Proxy]]:
        """Returns the proxies between a process and all others, each with the name of its server."""
        names = {"experience": "replay", "sampling": "replay", "weights": "learner"}
        proxies = [(client, names[link], proxy) for (client, link), proxy in self.fleet.proxies.items()]
        return [(server, proxy) for client, server, proxy in proxies if name in (client, server)]


def check_end(soak: Soak, programs: Programs) -> None:
    """Checks the invariants after every process has ended."""
    soak.violations += [f"{name} was left (process {pid})" for name, pid in programs.living().items()]
    soak.violations += growth([*soak.ended, *soak.lives.values()])
    soak.violations += soak.learning.relapses()
    learner = read_metrics(soak.fleet.directory / "metrics" / "learner.jsonl")
    if any("losses/td_loss" in line and line["losses/td_loss"] is None for line in learner):
        soak.violations.append("a loss was not finite")
    config = ("--config", str(ROOT / "configs" / "catch.yaml"))
    final = programs.start(*config, "--role", "evaluator", f"checkpoint={soak.fleet.directory}", "episodes=100")
    if final.exit_code(120) != 0 or "mean return" not in final.stdout:
        soak.violations.append(f"the last checkpoint does not load: {final.stdout}{final.stderr}")
    soak.violations += ledger_violations(read_books(soak.fleet.directory, soak.lives.values()))


def report(soak: Soak, minutes: float, seed: int) -> dict[str, Any]:
    """Returns the figures of a soak, with an empty `violations` if everything held."""
    lives = [*soak.ended, *soak.lives.values()]
    means = soak.learning.window_means()
    return {
        "minutes": minutes,
        "seed": seed,
        "faults": dict(sorted(Counter(kind for _, kind in soak.faults).items())),
        "lives": dict(Counter(life.name for life in lives)),
        "updates": soak.updates.total,
        "frames": soak.frames.total,
        "longest_gap_updates_seconds": round(soak.updates.longest_gap_seconds, 1),
        "longest_gap_frames_seconds": round(soak.frames.longest_gap_seconds, 1),
        "longest_leave_seconds": round(soak.longest_leave_seconds, 1),
        "mastered_seconds": soak.learning.mastered_seconds and round(soak.learning.mastered_seconds, 1),
        "lowest_minute_return": round(min(means), 2) if means else None,
        "final_minute_return": round(means[-1], 2) if means else None,
        "dropped": soak.fleet.dropped(),
        "ledger": newest_ledger(soak.fleet.directory),
        "resources": {f"{life.name} {life.number}": levels for life in lives if (levels := life.levels())},
        "violations": soak.violations,
    }


def soak(folder: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Runs a soak in an empty folder and returns its figures."""
    os.environ["PYTHONFAULTHANDLER"] = "1"  # see `_make_end`
    keys.create(folder / "keys")
    arguments = (*ARGUMENTS, f"security.keys={folder / 'keys'}")
    with Programs(folder) as programs, Fleet(programs, folder / "run", *arguments) as fleet:
        # First lives would else compile, and stay larger than those that read from the cache what they did.
        assert programs.start(*catch(folder / "compiled", "total_updates=200", *ARGUMENTS)).exit_code() == 0
        soak = Soak(fleet, random.Random(seed))
        soak.run(60 * minutes)
        soak.end()
        check_end(soak, programs)
        return report(soak, minutes, seed)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for logs and metrics, which are else removed")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="apex-jax-chaos-") as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = soak(folder, chosen.minutes, chosen.seed)
    print(json.dumps(figures), flush=True)
    return int(bool(figures["violations"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
