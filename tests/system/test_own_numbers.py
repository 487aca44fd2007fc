"""Numbers that an environment puts into `info` are curves of the training games and of the evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import apex_jax
from apex_jax.operations.pages import RunLines, page_data
from apex_jax.run.metrics import read_metrics

EPISODE_STEPS = 6
SMALL: dict[str, Any] = {
    "environment": {"task": "gymnasium:tests.system.test_own_numbers:Counting", "own_processes": False},
    "evaluator": {"episodes": 2, "interval_updates": 8},
    "network": {"hidden_units": 16},
    "replay": {"min_size_to_sample": 600},
    "metrics_interval_seconds": 0.2,
    "total_updates": 16,
}


class Counting(gymnasium.Env[np.ndarray, int]):
    """Its info has, at the end of a game, the number of steps, and in every second game whether all was well."""

    def __init__(self, faulty: bool = False) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)  # type: ignore[assignment]
        self.games, self.faulty = 0, faulty

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.games = 0, self.games + 1
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        ends, info = self.steps == EPISODE_STEPS, {"level": -1, "rest": [1, 2]}
        if ends:
            info |= {"level": "high" if self.faulty else np.int64(self.steps)}
            info |= {"is_success": True} if self.games % 2 else {}
        return np.full(2, action, np.float32), 1.0, ends, False, info


@pytest.mark.ci
@pytest.mark.timeout(200)
def test_numbers_in_info_are_metrics_evaluations_and_charts(tmp_path: Path) -> None:
    directory, seen = tmp_path / "run", list[dict[str, Any]]()
    run = apex_jax.train(
        "cartpole",
        run_directory=str(directory),
        metrics={"info": ["level", "is_success", "absent"]},
        callback=lambda games: seen.append(dict(games.info)),
        progress=False,
        **SMALL,
    )
    assert [games.info["level"].tolist() for games in run.evaluations] == [[6.0, 6.0]] * len(run.evaluations)
    np.testing.assert_array_equal(seen[0]["level"], [6.0, 6.0])
    assert np.isnan(run.evaluations[0].info["absent"]).all()
    lines = [line for file in directory.glob("metrics/*.jsonl") for line in read_metrics(file)]
    newest = {tag: value for line in lines for tag, value in line.items()}
    assert newest["charts/info_level"] == newest["eval/info_level"] == EPISODE_STEPS
    assert newest["charts/info_is_success"] == 1.0, "games that have no such number do not count"
    assert not {"charts/info_absent", "eval/info_absent"} & set(newest)
    data = page_data(run.config, RunLines(str(directory)).read(), None)
    [chart] = [chart for chart in data["charts"] if chart["title"] == "level"]
    assert [series["name"] for series in chart["series"]] == ["evaluation", "training, exploring"]
    assert all(set(series["y"]) == {EPISODE_STEPS} for series in chart["series"])
    json.dumps(data, allow_nan=False)


@pytest.mark.timeout(100)
def test_what_is_no_number_ends_the_run_with_its_name(tmp_path: Path) -> None:
    environment = {**SMALL["environment"], "settings": {"faulty": True}}
    settings = {**SMALL, "environment": environment, "metrics": {"info": ["level"]}}
    with pytest.raises(apex_jax.host.errors.RunError, match="level is high, not one number"):
        apex_jax.train("cartpole", run_directory=str(tmp_path / "run"), progress=False, **settings)
