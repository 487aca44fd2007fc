"""Copies the small files of a run to results/: `python -m results.publish RUN FOLDER`.

The copy reads like a run: `python main.py plot FOLDER`. Metrics are thinned to about one line a minute, or 30
lines of a run of less than half an hour; evaluations are all kept; checkpoints, logs and TensorBoard files stay
behind. With a destination that ends in .jsonl, all runs go into that one file, without pictures:
`python -m results.publish runs/Pong-v5-* results/pong/pong.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apex_jax.config.load import CONFIG_NAME, SETTINGS, load_run
from apex_jax.plotting.curves import ENDING
from apex_jax.run.metrics import read_metrics
from apex_jax.run.provenance import FILE_NAME, read_starts, value_of

TEXTS = (CONFIG_NAME, "evaluations.jsonl")
PICTURES = ("curves.png", "video.gif")
MACHINES_OWN = "working_directory"  # of a start: nobody else's
LINE_SECONDS = 60.0
LEAST_LINES = 30  # of a run of less than half an hour


def main() -> None:
    """Copies one run, or packs several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("destination", type=Path, help=f"a new folder for one run, or a file that ends in {ENDING}")
    arguments = parser.parse_args()
    if arguments.destination.suffix == ENDING:
        pack(arguments.runs, arguments.destination)
    elif len(arguments.runs) == 1:
        publish(arguments.runs[0], arguments.destination)
    else:
        parser.error(f"{arguments.destination}: several runs go into a file that ends in {ENDING}")


def publish(run: Path, destination: Path) -> None:
    """Copies the texts and pictures of a run, and its metrics, thinned; exits if it is no run."""
    of_processes = thinned_metrics(run)
    metrics = destination / "metrics"
    metrics.mkdir(parents=True, exist_ok=True)
    for name in (*TEXTS, *PICTURES):
        if (run / name).exists():
            shutil.copy(run / name, destination / name)
    (destination / FILE_NAME).write_text("".join(json.dumps(start) + "\n" for start in starts_of(run)))
    for process, lines in of_processes.items():
        (metrics / f"{process}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def pack(runs: Sequence[Path], destination: Path) -> None:
    """Writes a file of packed runs, each under the name of its directory; exits if one is no run."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.write_text("".join(map(packed_line, runs)))


def packed_line(run: Path) -> str:
    """Returns the packed line of a run; exits if the directory holds no run."""
    settings = {}
    if (run / CONFIG_NAME).is_file():
        config = load_run(run)
        settings = {name: value_of(config, name) for name in SETTINGS}
    packed = {"name": run.name, "config": settings, "starts": starts_of(run)}
    return json.dumps(packed | {"metrics": thinned_metrics(run)}, ensure_ascii=False) + "\n"


def starts_of(run: Path) -> list[dict[str, Any]]:
    """Returns the starts of a run, without MACHINES_OWN."""
    return [{key: value for key, value in start.items() if key != MACHINES_OWN} for start in read_starts(run)]


def thinned_metrics(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the metrics of each process of a run, the evaluator's whole; exits if it is no run."""
    files = sorted((run / "metrics").glob("*.jsonl"))
    if not files:
        sys.exit(f"{run} holds no metrics/*.jsonl: give the directory of a run")
    return {
        path.stem: lines if path.stem == "evaluator" else thinned(lines)
        for path, lines in ((path, read_metrics(path)) for path in files)
    }


def thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the first line of each minute (of a short run: of each 30th part), and the last of each start."""
    kept: list[dict[str, Any]] = []
    interval = min(LINE_SECONDS, (lines[-1]["time"] - lines[0]["time"]) / LEAST_LINES)
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        is_last = following is None or following["seconds"] < line["seconds"]
        if not kept or line["time"] - kept[-1]["time"] >= interval or is_last:
            kept.append({key: rounded(value) for key, value in line.items()})
    return kept


def rounded(value: Any) -> Any:
    """Rounds to six digits; times and counts stay as they are."""
    return float(f"{value:.6g}") if isinstance(value, float) and abs(value) < 1e6 else value


if __name__ == "__main__":
    main()
