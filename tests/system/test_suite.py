"""The suite of games: its one number, its resumption, and a short one from end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from apex_jax.environments.atari_scores import ATARI_SCORES
from results import suite
from results.suite import Played

GAMES = ("Boxing", "Breakout", "SpaceInvaders")


def run_of(game: str, score: float, seed: int = 1, spread: float = 0.0) -> Played:
    """Returns a run whose 30 games have this mean human-normalised score."""
    random, human = ATARI_SCORES[game].random, ATARI_SCORES[game].human
    scores = score + spread * np.linspace(-1, 1, suite.EPISODES)
    return Played(game, seed, 1e6, 15.0, 100, (random + (human - random) * scores).tolist(), training=score)


def write_run(directory: Path, games: int) -> None:
    """Writes what `result` reads of a run whose last params, of 100 updates, have played so many games."""
    (directory / "checkpoints" / "100").mkdir(parents=True)
    (directory / "metrics").mkdir()
    line = {"time": 60.0, "seconds": 60.0, "step": 5_000, "eval/episodic_return": 2.0}
    (directory / "metrics" / "evaluator.jsonl").write_text(json.dumps(line) + "\n")
    tag = "charts/episodic_return_epsilon_below_0.01"
    training = [{"time": n, "seconds": n, "step": 100 * n, tag: float(n)} for n in range(1, 51)]
    (directory / "metrics" / "actor.jsonl").write_text("".join(json.dumps(each) + "\n" for each in training))
    evaluations = [{"time": 60.0 + n, "updates": 100, "exploration": 0.0, "returns": [2.0] * n} for n in (10, games)]
    (directory / "evaluations.jsonl").write_text("".join(json.dumps(each) + "\n" for each in evaluations))


def test_statistics_are_of_the_mean_scores_of_the_runs() -> None:
    runs = [run_of(game, score) for game, score in zip(GAMES, (0.1, 0.4, 4.0), strict=True)]
    values = {name: suite.statistic_of(runs, function)[0] for name, function in suite.STATISTICS.items()}
    assert values == pytest.approx({"IQM": 2 / 3 * 0.4 + (0.1 + 4.0) / 6, "median": 0.4, "mean": 1.5})


def test_interval_has_the_chance_of_the_games_and_with_several_seeds_that_of_training() -> None:
    mean = suite.STATISTICS["mean"]
    _, low, high = suite.statistic_of([run_of("Boxing", 0.5)], mean)
    assert (low, high) == pytest.approx((0.5, 0.5))
    _, low, high = suite.statistic_of([run_of("Boxing", 0.5, spread=0.3)], mean)
    assert 0.05 < high - low < 0.2
    _, low, high = suite.statistic_of([run_of("Boxing", score, seed) for seed, score in enumerate((0.2, 0.8))], mean)
    assert (low, high) == pytest.approx((0.2, 0.8))


def test_table_compares_two_suites_over_the_games_of_both() -> None:
    base = [run_of("Boxing", 0.2, spread=0.1), run_of("Pong", 9.0)]
    better = [run_of("Boxing", 0.6, spread=0.1), run_of("Breakout", 5.0)]
    lines = suite.table({"base": base, "better": better}).splitlines()
    cells = {line.split(" | ")[0].strip("| "): [cell.strip(" |") for cell in line.split(" | ")[1:]] for line in lines}
    assert cells[""] == ["base", "better", "difference"]
    assert cells["Boxing"][2].startswith("+0.40 [+0.3")
    assert cells["Boxing, in training"] == ["0.2", "0.6", ""]
    assert cells["Breakout"][0] == cells["Breakout"][2] == ""
    assert "Pong" not in cells
    assert cells["IQM of human-normalised scores"][2] == "3.00 times"


def test_finished_runs_are_not_repeated_and_the_result_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "mine" / "Boxing-1", games=suite.EPISODES)
    write_run(tmp_path / "runs" / "mine" / "Breakout-1", games=20)
    commands: list[list[str]] = []

    def train(directory: Path, arguments: list[str]) -> None:
        commands.append(arguments)
        if "evaluator" in arguments:
            record = {"time": 99.0, "updates": 100, "exploration": 0.0, "returns": [3.0] * suite.EPISODES}
            with open(directory / "evaluations.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")

    monkeypatch.setattr(suite, "train", train)
    folders = ["--directory", str(tmp_path / "runs"), "--publish", str(tmp_path / "results")]
    arguments = ["mine", "--games", "Boxing", "Breakout", "--minutes", "2", *folders, "algorithm.n_step=3"]
    monkeypatch.setattr(sys, "argv", ["suite", *arguments])
    suite.main()
    trained, evaluated = commands
    assert {"environment.task=Breakout-v5", "seed=1", "algorithm.n_step=3", "total_minutes=2"} <= set(trained)
    assert {"--role", "evaluator", f"checkpoint={tmp_path}/runs/mine/Breakout-1", "episodes=30"} == set(evaluated)
    read = suite.read(tmp_path / "results" / "mine.jsonl")
    last_fifth = np.arange(40, 51).mean()
    assert [(run.game, run.frames, run.updates, run.returns, run.training) for run in read] == [
        ("Boxing", 5_000.0, 100, [2.0] * 30, last_fifth),
        ("Breakout", 5_000.0, 100, [3.0] * 30, last_fifth),
    ]
    assert (tmp_path / "results" / "mine.png").stat().st_size > 1_000
    assert "IQM of human-normalised scores" in capsys.readouterr().out


def test_a_number_of_updates_takes_the_place_of_the_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["suite", "mine", "--updates", "280000"])
    assert suite.limits(suite.parsed()) == ["total_minutes=0", "total_updates=280000"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_suite_trains_and_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["actor.environments=4", "replay.min_size_to_sample=500", "evaluator.max_episode_frames=400"]
    folders = ["--directory", str(tmp_path / "runs"), "--publish", str(tmp_path / "results")]
    arguments = ["short", "--games", "Pong", "--minutes", "0.2", *folders, *small]
    monkeypatch.setattr(sys, "argv", ["suite", *arguments])
    suite.main()
    [run] = suite.read(tmp_path / "results" / "short.jsonl")
    assert run.updates > 0
    assert len(run.returns) == suite.EPISODES
