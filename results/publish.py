"""Copies what is small of a run to results/: `python -m results.publish RUN results/pong/seed-1`.

The copy reads like a run: `python main.py plot results/pong/seed-*`. Metrics are thinned to about one line a minute,
evaluations are all kept; checkpoints, logs and TensorBoard files stay behind.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apex_jax.metrics import read_metrics

TEXTS = ("config.yaml", "starts.jsonl", "changes.jsonl", "evaluations.jsonl")
PICTURES = ("curves.png", "video.gif")
LINE_SECONDS = 60.0


def main() -> None:
    """Copies one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    publish(arguments.run, arguments.destination, (*TEXTS, *PICTURES))


def publish(run: Path, destination: Path, whole: Sequence[str]) -> None:
    """Copies the metrics of a run, thinned, and those of its files that are named in `whole`; exits if it is no run."""
    files = sorted((run / "metrics").glob("*.jsonl"))
    if not files:
        sys.exit(f"{run} holds no metrics/*.jsonl: give the directory of a run")
    metrics = destination / "metrics"
    metrics.mkdir(parents=True, exist_ok=True)
    for name in whole:
        if (run / name).exists():
            shutil.copy(run / name, destination / name)
    for path in files:
        lines = read_metrics(path)
        kept = lines if path.stem == "evaluator" else thinned(lines)
        (metrics / path.name).write_text("".join(json.dumps(line) + "\n" for line in kept))


def thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the first line of each minute, and the last of each start of the process."""
    kept: list[dict[str, Any]] = []
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        is_last = following is None or following["seconds"] < line["seconds"]
        if not kept or line["time"] - kept[-1]["time"] >= LINE_SECONDS or is_last:
            kept.append({key: rounded(value) for key, value in line.items()})
    return kept


def rounded(value: Any) -> Any:
    """Rounds to six digits; times and counts stay as they are."""
    return float(f"{value:.6g}") if isinstance(value, float) and abs(value) < 1e6 else value


if __name__ == "__main__":
    main()
