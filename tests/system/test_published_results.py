"""The files under results/ can be plotted, and agree with its README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from apex_jax.plotting.packed_runs import read_packed
from apex_jax.plotting.plot import draw_each_against_the_first
from apex_jax.plotting.plot_command import groups_of
from results import ablations, scores, suite
from tests.rigs.runs import ROOT


@pytest.mark.parametrize("path", scores.packed_files(), ids=lambda path: path.stem)
def test_published_file_holds_runs_that_plot_reads(path: Path) -> None:
    for published in read_packed(path):
        assert published.evaluation.returns.size > (0 if path.parent.name == "gpu" else 3)  # runs of two minutes
        assert re.search(r"-v\d$", published.task)


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
    assert printed in (ROOT / "results" / "README.md").read_text()
    assert [line.count("|") for line in printed.splitlines()] == [7] * (2 + len(variants))
    draw_each_against_the_first(groups, tmp_path / "ablations.png")
    with (
        Image.open(tmp_path / "ablations.png") as drawn,
        Image.open(folder / "ablations.png") as published,
    ):
        assert drawn.size == published.size == (1100, 620), "two rows of three panels"


@pytest.mark.long
def test_scores_are_those_of_the_published_runs() -> None:
    assert scores.FILE.read_text() == scores.table(), "run: python -m results.scores"
