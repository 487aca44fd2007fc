"""Directories of runs, as training leaves them, and runs without one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from apex_jax.config.load import load, to_yaml
from apex_jax.plotting.curves import Curve, Run

START = 1_000_000.0  # unix seconds
RETURN = "eval/episodic_return"


def make_run(
    directory: Path, returns: Sequence[float], overrides: tuple[str, ...] = (), starts: tuple[float, ...] = (START,)
) -> Path:
    """Writes a run with an evaluation after each minute and each million frames."""
    (directory / "metrics").mkdir(parents=True)
    (directory / "config.yaml").write_text(to_yaml(load(None, [*overrides, f"run_directory={directory}"])))
    (directory / "starts.jsonl").write_text("".join(json.dumps({"time": t, "task": "Pong-v5"}) + "\n" for t in starts))
    write_lines(
        directory / "metrics" / "evaluator.jsonl", [(60.0 * i, i, {RETURN: r}) for i, r in enumerate(returns, 1)]
    )
    return directory


def write_lines(path: Path, lines: Sequence[tuple[float, float, Mapping[str, float | None]]]) -> None:
    """Writes lines of metrics: (seconds after START, million frames, values)."""
    texts = [json.dumps({"time": START + s, "seconds": s, "step": int(m * 1e6), **values}) for s, m, values in lines]
    path.write_text("\n".join([*texts, ""]))


def plain_run(returns: list[float], task: str = "Pong-v5") -> Run:
    positions = np.arange(1.0, len(returns) + 1)
    return Run("", task, Curve(positions * 1e6, positions, np.array(returns)), {}, {})


ROOT = Path(__file__).parents[2]
