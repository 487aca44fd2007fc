"""Writes every evaluation of the published runs to results/scores.csv: `python -m results.scores`.

A row is exp_name,env_name,seed,metric,env_step,value: the schema in which BRO, SimBa, XQC and FlashSAC publish theirs.
exp_name is the folder under results/ and the file; env_name is EnvPool's name of the task;
env_step counts emulator frames; the metrics are "return", the mean of the games of an evaluation, and "minutes", when
it ended.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from apex_jax.plotting.curves import Run, read_packed

FOLDER = Path(__file__).parent
FILE = FOLDER / "scores.csv"
HEADER = ("exp_name", "env_name", "seed", "metric", "env_step", "value")


def main() -> None:
    """Writes the file, or exits if it is asked for something else."""
    if sys.argv[1:]:
        sys.exit(f"{sys.argv[1]}: takes no argument; it reads all of results/")
    FILE.write_text(table())


def table() -> str:
    """Returns the file's content."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for name, seed, run in published():
        curve = run.evaluation
        for frames, minutes, value in zip(curve.frames, curve.minutes, curve.returns, strict=True):
            row = (name, run.task, seed)
            writer.writerow((*row, "return", int(frames), f"{value:.6g}"))
            writer.writerow((*row, "minutes", int(frames), f"{minutes:.3f}"))
    return text.getvalue()


def packed_files() -> list[Path]:
    """Returns the files of runs under results/; those of a suite hold no more than the returns of games."""
    return sorted(path for path in FOLDER.glob("*/*.jsonl") if path.parent.name != "suite")


def published() -> Iterator[tuple[str, int, Run]]:
    """Yields the name, seed and run of each run under results/, in the order of their names."""
    for path in packed_files():
        seeds = [json.loads(line)["starts"][0]["seed"] for line in path.read_text().splitlines()]
        for seed, run in zip(seeds, read_packed(path), strict=True):
            yield f"{path.parent.name}/{path.stem}", seed, run


if __name__ == "__main__":
    main()
