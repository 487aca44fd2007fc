"""A run's configuration, progress and clock for the live view."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from apex_jax.config import ActorConfig, Config, ReplayConfig
from apex_jax.operations.progress import EvaluationSummary, RunProgress

START = 1_000_000.0  # unix seconds


class Clock:
    """Time that a test sets."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def write(
    directory: Path, name: str, seconds: float, step: int, started: float = START, **values: float | None
) -> None:
    """Appends what process `name`, started at `started`, writes `seconds` later; `__` in a keyword stands for `/`."""
    path = directory / "metrics" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    tags = {tag.replace("__", "/"): value for tag, value in values.items()}
    with open(path, "a") as file:
        file.write(json.dumps({"time": started + seconds, "seconds": seconds, "step": step} | tags) + "\n")


def config(**changes: object) -> Config:
    replay = ReplayConfig(capacity_transitions=10_000, min_size_to_sample=1_000, samples_per_insert=2.0)
    return Config(replay=replay, actor=ActorConfig(processes=2)).replace(**changes)


def progress(**changes: object) -> RunProgress:
    base = RunProgress(
        phase="learning",
        elapsed_seconds=3723.9,
        frames=12_345_678,
        frames_per_second=5120.4,
        updates=98_765,
        updates_per_second=42.13,
        replay_size=61_234,
        samples_per_insert=2.013,
        training_return=-12.34,
        latest_evaluation=EvaluationSummary(7.25, 0.7918, 98_000),
        best_evaluation=EvaluationSummary(9.5, 0.8555, 5_000),
        seconds_left=5400.0,
        roles={"learner": "running", "replay": "running", "actor-0": "restarted 1x", "evaluator": "running"},
        memory_bytes=3 * 2**30,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]
