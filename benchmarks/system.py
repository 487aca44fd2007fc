"""Updates/s of `python main.py` on this machine, relative to the limit if its parts share the cores.

Measured alone, with all cores, the actor makes a steps/s and the learner u updates/s. A run with r steps per update can
then make at most 1 / (1 / u + r / a) updates/s; r is measured in the run itself.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from apex_jax.run.metrics import read_metrics
from apex_jax.settings import load
from apex_jax.workers.learner import compute_dtype
from benchmarks.actor import actor_steps_per_second
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT
from benchmarks.update import BareUpdate

WARM_UP_SECONDS = 30.0  # after the first update


def main() -> None:
    """Measures the parts, the whole, and the parts again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="pong_cpu", help="name of a file in configs/")
    parser.add_argument("--minutes", type=float, default=5.0, help="of running the whole")
    arguments = parser.parse_args()
    config = load(ROOT / "configs" / f"{arguments.config}.yaml")
    frame_skip = config.environment.frame_skip
    parts = [parts_alone(arguments.config)]
    frames, updates = whole(arguments.config, ["total_minutes=0"], WARM_UP_SECONDS, 60 * arguments.minutes)
    say(f"the whole: {frames:,.0f} frames/s, {updates:,.1f} updates/s")
    parts.append(parts_alone(arguments.config))
    actor, learner = (2 / (1 / a + 1 / b) for a, b in zip(*parts, strict=True))
    steps_per_update = frames / frame_skip / updates
    limit = 1 / (1 / learner + steps_per_update / actor)
    figures = {
        "frames/s": frames,
        "updates/s": updates,
        "actor alone, frames/s": actor * frame_skip,
        "bare update alone, updates/s": learner,
        "limit where the parts share the cores, updates/s": limit,
    }
    finish("system", figures, {"of what the parts allow": target(updates / limit, at_least=0.9)})


def parts_alone(name: str) -> tuple[float, float]:
    """Returns steps/s of the actor process and updates/s of the bare update."""
    actor = actor_steps_per_second(name, [], seconds=10.0)
    config = load(ROOT / "configs" / f"{name}.yaml")
    learner = BareUpdate(config, compute_dtype(config)).per_second(10.0)
    say(f"alone: {actor:,.0f} steps/s, {learner:,.1f} updates/s")
    return actor, learner


def whole(name: str, settings: list[str], warm_up_seconds: float, seconds: float) -> tuple[float, float]:
    """Returns frames/s and updates/s of a run with all its roles, evaluations included.

    `warm_up_seconds`: after the first update.
    """
    with tempfile.TemporaryDirectory(prefix="apex-jax-benchmark-") as directory:
        config = str(ROOT / "configs" / f"{name}.yaml")
        command = [sys.executable, str(ROOT / "main.py"), "--config", config, f"run_directory={directory}", *settings]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            learner, replay = (Path(directory) / "metrics" / f"{role}.jsonl" for role in ("learner", "replay"))
            while not any(line["learner/updates"] for line in lines_of(learner)):
                assert process.poll() is None, "the run ended by itself"
                time.sleep(0.1)
            time.sleep(warm_up_seconds)
            skip = len(lines_of(learner)), len(lines_of(replay))
            time.sleep(seconds)
            while len(lines_of(learner)) == skip[0] or len(lines_of(replay)) == skip[1]:
                time.sleep(0.1)
            updates = [line["charts/updates_per_second"] for line in lines_of(learner)[skip[0] :]]
            frames = [line["charts/environment_frames_per_second"] for line in lines_of(replay)[skip[1] :]]
            process.send_signal(signal.SIGINT)
    return statistics.mean(frames), statistics.mean(updates)


def lines_of(metrics: Path) -> list[dict[str, float]]:
    """Returns the lines of metrics that a role has written so far."""
    return read_metrics(metrics) if metrics.exists() else []


if __name__ == "__main__":
    main()
