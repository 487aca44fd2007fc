"""What a run says at its end: what came out, where it is, and advice that works."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from apex_jax.environments.environment import has_screen
from apex_jax.operations.live_view import final_summary
from apex_jax.operations.progress import ProgressReader
from apex_jax.settings import load
from tests.rigs.live_views import START, Clock, config, progress, write
from tests.rigs.processes import ROOT

CHECKPOINT = "checkpoints/4000"


def run_with(directory: Path, *names: str) -> str:
    """Returns a run directory in which there are directories of these names."""
    for name in names:
        (directory / name).mkdir(parents=True)
    return str(directory)


def test_summary_lists_results_and_commands_to_look_at_them(tmp_path: Path) -> None:
    run = run_with(tmp_path / "my runs", CHECKPOINT, "tensorboard", "metrics")
    text = final_summary(progress(), config(run_directory=run), has_screen=True)
    assert "Ran for 1:02:03: 12,345,678 frames and 98,765 updates in all" in text
    assert (
        "Evaluation:  7.25 (79% of human) after 98,000 updates, best 9.5 (86% of human) after 5,000 updates\n" in text
    )
    assert f"Files:       '{run}' (checkpoints, metrics)" in text
    assert f"-m tensorboard.main --logdir '{run}/tensorboard'" in text
    assert f"python main.py --role evaluator checkpoint='{run}' episodes=100" in text
    assert f"checkpoint='{run}' episodes=1 video='{run}/game'" in text
    assert "curves.png" not in text


@pytest.mark.parametrize("new_updates", [0, 50])
def test_summary_of_an_already_finished_run_shows_how_to_extend_it(tmp_path: Path, new_updates: int) -> None:
    write(tmp_path, "learner", 9, 4000, learner__updates=100)
    write(tmp_path, "evaluator", 9, 4000, eval__episodic_return=1.0, eval__updates=100.0)
    reader = ProgressReader(str(tmp_path), config(total_updates=100 + new_updates), Clock())
    write(tmp_path, "learner", 1, 4000, started=START + 60, learner__updates=100 + new_updates)
    text = final_summary(reader.read(), config(run_directory=str(tmp_path)), has_screen=False)
    words = "an earlier start had reached total_updates=100; with a higher limit, or 0 for none, the run goes on"
    assert (words in text) == (new_updates == 0)
    assert ("Nothing new" in text) == (new_updates == 0)
    assert ("\nEnded:       total_updates=150 is reached\n" in text) == (new_updates == 50)
    assert "Evaluation:  1.0 after 100 updates, best 1.0 after 100 updates\n" in text


def test_summary_of_a_run_without_a_checkpoint_offers_no_game_of_it(tmp_path: Path) -> None:
    text = final_summary(progress(), config(run_directory=run_with(tmp_path, "checkpoints/.saving-8")), has_screen=True)
    assert "--role evaluator" not in text
    assert "Checkpoint:  none was saved: the same command starts from the beginning" in text


def test_summary_of_a_game_without_a_screen_offers_no_film(tmp_path: Path) -> None:
    text = final_summary(progress(), config(run_directory=run_with(tmp_path, CHECKPOINT)), has_screen=False)
    assert "episodes=100" in text
    assert "video=" not in text


def test_summary_reports_the_film_of_a_simulator_or_what_it_needs(tmp_path: Path) -> None:
    run = run_with(tmp_path, CHECKPOINT)
    text = final_summary(
        progress(film_return=951.23), config(run_directory=run), has_screen=True, film_needs="pip install x"
    )
    assert "\nFilm:        951.2, in the task's own simulator, which no training has seen\n" in text
    text = final_summary(progress(), config(run_directory=run), has_screen=True, film_needs="pip install x")
    assert "\nFilm:        none; it needs pip install x\n" in text
    assert "Film: " not in final_summary(progress(), config(run_directory=run), has_screen=True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [("catch", False), ("walker", False), ("pendulum", True), ("mountain_car", True), ("pong_cpu", True)],
)
def test_a_game_has_a_screen_if_it_can_be_filmed(config: str, expected: bool) -> None:
    assert has_screen(load(ROOT / "configs" / f"{config}.yaml", [])) == expected


def test_summary_of_a_short_run_names_only_existing_files(tmp_path: Path) -> None:
    text = final_summary(progress(), config(run_directory=run_with(tmp_path, "logs")), has_screen=True)
    assert f"Files:       {tmp_path} (logs)" in text
    assert "tensorboard" not in text


def test_summary_names_the_existing_pictures(tmp_path: Path) -> None:
    names = ("report.html", "curves.png", "video.mp4")
    for name in names:
        (tmp_path / name).touch()
    text = final_summary(progress(), config(run_directory=str(tmp_path)), has_screen=True)
    assert "".join(f"Look at:     {tmp_path}/{name}\n" for name in names) in text
    assert "video.gif" not in text


@pytest.mark.parametrize("age_seconds", [-5, 5])
def test_summary_leaves_out_a_film_that_is_older_than_the_newest_checkpoint(tmp_path: Path, age_seconds: int) -> None:
    run_with(tmp_path, "checkpoints/1000", CHECKPOINT)
    for path, seconds in (("checkpoints/1000", -9), (CHECKPOINT, 0), ("video.mp4", -age_seconds), ("curves.png", -9)):
        (tmp_path / path).touch()
        os.utime(tmp_path / path, (START + seconds, START + seconds))
    text = final_summary(progress(), config(run_directory=str(tmp_path)), has_screen=True)
    assert ("video.mp4" in text) == (age_seconds < 0)
    assert "curves.png" in text


def test_summary_names_the_interpreter_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", os.path.abspath(".venv/bin/python"))
    text = final_summary(progress(), config(run_directory=run_with(tmp_path, CHECKPOINT)), has_screen=True)
    assert ".venv/bin/python main.py --role evaluator" in text
