"""The files under results/ can be plotted, and agree with its README; the suite of games, from end to end."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from apex_jax import load_policy
from apex_jax.config.command_line import parse
from apex_jax.config.load import SETTINGS
from apex_jax.environments.atari_scores import ATARI_SCORES
from apex_jax.plotting.curves import Curve, Run, read_packed
from apex_jax.plotting.plot import groups_of
from apex_jax.run.provenance import value_of
from results import ablations, scores, suite
from results.suite import Played
from tests.rigs.runs import ROOT

OF_MAIN = [row for row in scores.rows() if row.command.startswith("`python main.py") and "](" not in row.command]
# By default there is one actor for some cores, and in one process all environments take each step.
OF_ONE_RUN = ("seed", "run_directory", "actor.processes", "actor.environments_per_step", "addresses.")


@pytest.mark.parametrize("path", scores.packed_files(), ids=lambda path: path.stem)
def test_published_file_holds_runs_that_plot_reads(path: Path) -> None:
    for published in read_packed(path):
        assert published.evaluation.returns.size > (0 if path.parent.name == "gpu" else 2)  # runs of two minutes
        assert re.search(r"-v\d$|-MinAtar$|:CarRacing$", published.task)


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "suite").glob("*.jsonl")), ids=lambda path: path.stem)
def test_published_suite_holds_all_games_of_each_run(path: Path) -> None:
    runs = suite.read(path)
    assert runs
    assert {len(run.returns) for run in runs} == {suite.EPISODES}


@pytest.mark.long
def test_published_ablations_are_those_of_the_published_runs(tmp_path: Path) -> None:
    folder, variants = ROOT / "results" / "ablations", ablations.DQN
    groups = groups_of([f"{name}={folder / ablations.file_of(name)}" for name in variants])
    printed = ablations.table(groups)
    assert (folder / "table.md").read_text() == printed + "\n"
    assert [line.count("|") for line in printed.splitlines()] == [7] * (2 + len(variants))
    ablations.draw(groups, tmp_path / "ablations.png")
    with (
        Image.open(tmp_path / "ablations.png") as drawn,
        Image.open(folder / "ablations.png") as published,
    ):
        assert drawn.size == published.size == (1100, 620), "two rows of three panels"


@pytest.mark.ci
def test_scores_and_tables_are_those_of_the_published_runs() -> None:
    for path, text in scores.pages().items():
        assert path.read_text() == text, "run: python -m results.scores"


@pytest.mark.ci
def test_every_published_run_is_in_the_table() -> None:
    files = {str(path.relative_to(scores.FOLDER)) for path in scores.packed_files()}
    beside = {"half_cheetah/stable_baselines3.jsonl", "walker/killed.jsonl"}  # a peer, and a picture's second line
    assert {file for file in files - beside if not file.startswith("ablations")} == {row.file for row in scores.rows()}


@pytest.mark.ci
@pytest.mark.parametrize("row", OF_MAIN, ids=lambda row: row.file)
def test_command_of_a_row_gives_the_settings_of_its_runs(row: scores.Row) -> None:
    config = parse(shlex.split(row.command.strip("`"))[2:]).config
    given = {name: json.loads(json.dumps(value_of(config, name))) for name in SETTINGS}
    for line in (scores.FOLDER / row.file).read_text().splitlines():
        had = json.loads(line)["config"]
        differing = {name for name in given.keys() & had.keys() if given[name] != had[name]}
        assert {name for name in differing if not name.startswith(OF_ONE_RUN)} == {*row.changed}
        assert {name: had[name] for name in row.changed} == dict(row.changed)


def test_a_row_has_the_last_evaluations_of_all_runs_and_who_reached_the_mark() -> None:
    minutes = np.array([1.0, 2.0, 3.0])
    curves = [Curve(minutes, minutes, np.array(values)) for values in ([5.0, 18.5, 9.0], [1.0, 2.0, 3.0])]
    runs = [Run("", "Pong-v5", curve, {}, {}) for curve in curves]
    assert scores.last(runs) == "**6** (3 to 9)"
    row = scores.Row("", "", "", mark=18)
    assert scores.reached(row, runs) == "18: after 2.0 minutes, 1 of 2"
    assert scores.reached(row._replace(mark=19, of="solved"), runs) == "19 (solved): not reached"


@pytest.mark.parametrize("folder", [
    pytest.param(path, id=path.parent.name, marks=() if path.parent.name == "lunar_lander" else pytest.mark.long)
    for path in sorted(ROOT.glob("results/*/policy"))
])  # fmt: skip
def test_trained_agent_loads_acts_and_is_small(folder: Path) -> None:
    policy = load_policy(folder)
    spec = policy.environment_spec.spec
    action, value = policy.act(np.zeros((spec.frame_stack, *spec.frame_shape), spec.frame_dtype))
    assert spec.action.low <= np.min(action) <= np.max(action) <= spec.action.high
    assert np.isfinite(value)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000


# The suite of games -----------------------------------------------------------------------------------------------


GAMES = ("Boxing", "Breakout", "SpaceInvaders")


def run_of(game: str, score: float, seed: int = 1, spread: float = 0.0) -> Played:
    """Returns a run whose 30 games have this mean human-normalised score."""
    random, human = ATARI_SCORES[game].random, ATARI_SCORES[game].human
    scores = score + spread * np.linspace(-1, 1, suite.EPISODES)
    return Played(game, seed, 1e6, 15.0, 100, (random + (human - random) * scores).tolist(), training=score)


def test_statistics_are_of_the_mean_scores_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "RESAMPLES", 20)
    runs = [run_of(game, score) for game, score in zip(GAMES, (0.1, 0.4, 4.0), strict=True)]
    values = {name: suite.statistic_of(runs, function)[0] for name, function in suite.STATISTICS.items()}
    assert values == pytest.approx({"IQM": 2 / 3 * 0.4 + (0.1 + 4.0) / 6, "median": 0.4, "mean": 1.5})


def test_table_compares_two_suites_over_the_games_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "RESAMPLES", 20)
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_suite_trains_and_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["actor.environments=4", "replay.min_size_to_sample=500", "evaluator.max_episode_frames=400"]
    small += ["learner.updates_per_call=1"]
    folders = ["--directory", str(tmp_path / "runs"), "--publish", str(tmp_path / "results")]
    arguments = ["short", "--games", "Pong", "--minutes", "0.2", *folders, *small]
    monkeypatch.setattr(sys, "argv", ["suite", *arguments])
    suite.main()
    [run] = suite.read(tmp_path / "results" / "short.jsonl")
    assert run.updates > 0
    assert len(run.returns) == suite.EPISODES
    monkeypatch.delattr(suite, "train")
    suite.main()
    assert suite.read(tmp_path / "results" / "short.jsonl") == [run], "what is finished is not repeated"
