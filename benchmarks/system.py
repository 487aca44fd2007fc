"""`python main.py` on this machine: how soon it trains, and its updates/s relative to what its parts allow.

The time from the command to the first update, and to each step before it, is measured with an empty compilation cache
and then with a filled one.
Measured alone, with all cores, the actor makes a steps/s and the learner u updates/s. A run with r steps per update can
then make at most 1 / (1 / u + r / a) updates/s; r is measured in the run itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from apex_jax.config.load import load
from apex_jax.run.metrics import read_metrics
from apex_jax.workers.learner import compute_dtype
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT
from benchmarks.update import BareUpdate
from benchmarks.workers import actor_steps_per_second

WARM_UP_SECONDS = 30.0  # after the first update


def main() -> None:
    """Measures the starts, the parts, the whole, and the parts again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="pong_cpu", help="name of a file in configs/")
    parser.add_argument("--minutes", type=float, default=5.0, help="of running the whole; 0 = only the starts")
    parser.add_argument("--warm-starts", type=int, default=2)
    arguments = parser.parse_args()
    found = starts(arguments.config, arguments.warm_starts)
    cold, *warm = (parts["first update"] for parts in found)
    figures: dict[str, object] = {"cold start, s": cold, "warm starts, s": warm, "parts of each start, s": found}
    targets = {"warm start, as a share of a cold one": target(sum(warm) / len(warm) / cold, at_most=0.75)}
    if arguments.minutes:
        rates = rates_of(arguments.config, 60 * arguments.minutes)
        figures |= rates
        share = rates["updates/s"] / rates["limit where the parts share the cores, updates/s"]
        targets["of what the parts allow"] = target(share, at_least=0.9)
    finish("system", figures, targets)


def starts(name: str, number: int) -> list[dict[str, float]]:
    """Returns the parts of a start without compiled programs, and of so many starts with them."""
    found = []
    with tempfile.TemporaryDirectory(prefix="apex-jax-benchmark-") as cache:
        for temperature in ("cold", *["warm"] * number):
            start = time.time()
            with running(name, ["metrics_interval_seconds=0.2"], cache) as directory:
                found.append(parts_of(directory, start))
            say(f"{temperature} start, s: {', '.join(f'{part} {at:.1f}' for part, at in found[-1].items())}")
    return found


def parts_of(directory: Path, start: float) -> dict[str, float]:
    """Returns when each part of a start was done, in seconds since `start`, a unix time.

    A role writes metrics once it has imported what it needs, and has its environments and links.
    """
    lines = {name: lines_of(directory / "metrics" / f"{name}.jsonl") for name in ("replay", "learner", "actor-0")}
    least = load(directory / "config.yaml").replay.min_size_to_sample
    done = {name: role[0] for name, role in lines.items() if role}
    done["first transitions"] = next(line for line in lines["replay"] if line["replay/size_transitions"])
    filled = [line for line in lines["replay"] if line["replay/size_transitions"] >= least]
    done |= {"enough to draw from": filled[0]} if filled else {}
    done["first update"] = next(line for line in lines["learner"] if line["learner/updates"])
    return {part: round(line["time"] - start, 1) for part, line in done.items()}


def rates_of(name: str, seconds: float) -> dict[str, float]:
    """Returns the rates of the whole, those of its parts alone, and the limit that follows from them."""
    frame_skip = load(ROOT / "configs" / f"{name}.yaml").environment.frame_skip
    parts = [parts_alone(name)]
    frames, updates = whole(name, ["total_minutes=0"], WARM_UP_SECONDS, seconds)
    say(f"the whole: {frames:,.0f} frames/s, {updates:,.1f} updates/s")
    parts.append(parts_alone(name))
    actor, learner = (2 / (1 / a + 1 / b) for a, b in zip(*parts, strict=True))
    steps_per_update = frames / frame_skip / updates
    return {
        "frames/s": frames,
        "updates/s": updates,
        "actor alone, frames/s": actor * frame_skip,
        "bare update alone, updates/s": learner,
        "limit where the parts share the cores, updates/s": 1 / (1 / learner + steps_per_update / actor),
    }


def parts_alone(name: str) -> tuple[float, float]:
    """Returns steps/s of the actor process and updates/s of the bare update."""
    actor = actor_steps_per_second(name, [], seconds=10.0)
    config = load(ROOT / "configs" / f"{name}.yaml")
    learner = BareUpdate(config, compute_dtype(config)).per_second(10.0)
    say(f"alone: {actor:,.0f} steps/s, {learner:,.1f} updates/s")
    return actor, learner


def whole(name: str, settings: Sequence[str], warm_up_seconds: float, seconds: float) -> tuple[float, float]:
    """Returns frames/s and updates/s of a run with all its roles, evaluations included.

    `warm_up_seconds`: after the first update.
    """
    with running(name, settings) as directory:
        learner, replay = (directory / "metrics" / f"{role}.jsonl" for role in ("learner", "replay"))
        time.sleep(warm_up_seconds)
        skip = len(lines_of(learner)), len(lines_of(replay))
        time.sleep(seconds)
        while len(lines_of(learner)) == skip[0] or len(lines_of(replay)) == skip[1]:
            time.sleep(0.1)
        updates = [line["charts/updates_per_second"] for line in lines_of(learner)[skip[0] :]]
        frames = [line["charts/environment_frames_per_second"] for line in lines_of(replay)[skip[1] :]]
    return statistics.mean(frames), statistics.mean(updates)


@contextlib.contextmanager
def running(name: str, settings: Sequence[str], cache: str | None = None) -> Iterator[Path]:
    """Starts a run and waits for its first update; yields its directory, and ends the run.

    `cache`: directory of compiled programs, None = that of this user.
    """
    environment = dict(os.environ)
    if cache is not None:
        environment["XDG_CACHE_HOME"] = cache
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    with tempfile.TemporaryDirectory(prefix="apex-jax-benchmark-") as directory:
        config = str(ROOT / "configs" / f"{name}.yaml")
        command = [sys.executable, str(ROOT / "main.py"), "--config", config, f"run_directory={directory}", *settings]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
            try:
                learner = Path(directory, "metrics", "learner.jsonl")
                while not any(line["learner/updates"] for line in lines_of(learner)):
                    assert process.poll() is None, f"the run ended by itself; see {directory}/logs"
                    time.sleep(0.1)
                yield Path(directory)
            finally:
                process.send_signal(signal.SIGINT)


def lines_of(metrics: Path) -> list[dict[str, float]]:
    """Returns the lines of metrics that a role has written so far."""
    return read_metrics(metrics) if metrics.exists() else []


if __name__ == "__main__":
    main()
