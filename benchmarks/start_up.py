"""From `python main.py` to the first learner update, with an empty compilation cache and then with a filled one."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from apex_jax.run.metrics import read_metrics
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT


def main() -> None:
    """Measures a cold start, then warm ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", type=int, default=2, help="warm starts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="apex-jax-benchmark-") as cache:
        cold = seconds_to_first_update(cache)
        say(f"cold: {cold:.1f} s")
        warm = []
        for _ in range(arguments.warm):
            warm.append(seconds_to_first_update(cache))
            say(f"warm: {warm[-1]:.1f} s")
    figures = {"cold, s": cold, "warm, s": warm}
    finish("start_up", figures, {"warm, as a share of cold": target(sum(warm) / len(warm) / cold, at_most=0.75)})


def seconds_to_first_update(cache: str) -> float:
    """Runs until the first update; returns the seconds this took. `cache`: directory of compiled programs."""
    environment: dict[str, Any] = {**os.environ, "XDG_CACHE_HOME": cache}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    with tempfile.TemporaryDirectory(prefix="apex-jax-benchmark-") as directory:
        command = [sys.executable, str(ROOT / "main.py"), f"run_directory={directory}", "metrics_interval_seconds=0.2"]
        start = time.time()
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
            metrics = Path(directory) / "metrics" / "learner.jsonl"
            while (first := first_update_seconds(metrics)) is None:
                assert process.poll() is None, f"the run ended by itself; see {directory}/logs"
                time.sleep(0.1)
            process.terminate()
    return first - start


def first_update_seconds(metrics: Path) -> float | None:
    """Returns the system time of the learner's first line of metrics with an update, None if there is none."""
    lines = read_metrics(metrics) if metrics.exists() else []
    return next((float(line["time"]) for line in lines if line["learner/updates"]), None)


if __name__ == "__main__":
    main()
