"""What a run prints at its end: its results, its files, and commands that work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from apex_jax.config.load import load
from apex_jax.environments.environment import can_render
from apex_jax.operations.live_view import final_summary
from apex_jax.operations.progress import ProgressReader
from tests.rigs.live_views import START, Clock, config, progress, write
from tests.rigs.processes import ROOT

CHECKPOINT = "checkpoints/4000"


def summary_of(run: Path, *folders: str, screen: bool = True, video_needs: str = "", **changes: object) -> str:
    """Returns the summary of a run whose directory has these folders."""
    for name in folders:
        (run / name).mkdir(parents=True)
    return final_summary(progress(**changes), config(run_directory=str(run)), screen, video_needs)


def test_summary_lists_results_and_commands_to_look_at_them(tmp_path: Path) -> None:
    run = tmp_path / "my runs"
    text = summary_of(run, CHECKPOINT, "tensorboard", "metrics")
    for part in (
        "1:02:03: 12,345,678 frames and 98,765 updates",
        "7.25 (79% of human) after 98,000 updates, best 9.5 (86% of human) after 5,000 updates\n",
        f"'{run}' (checkpoints, metrics)",
        f"-m tensorboard.main --logdir '{run}/tensorboard'",
        f"python main.py --role evaluator checkpoint='{run}' episodes=100",
        f"checkpoint='{run}' episodes=1 video='{run}/game'",
    ):
        assert part in text
    assert "curves.png" not in text


@pytest.mark.parametrize("new_updates", [0, 50])
def test_summary_of_an_already_finished_run_shows_how_to_extend_it(tmp_path: Path, new_updates: int) -> None:
    write(tmp_path, "learner", 9, 4000, learner__updates=100)
    reader = ProgressReader(str(tmp_path), config(total_updates=100 + new_updates), Clock())
    write(tmp_path, "learner", 1, 4000, started=START + 60, learner__updates=100 + new_updates)
    text = final_summary(reader.read(), config(run_directory=str(tmp_path)), can_render=False)
    assert ("Nothing new: an earlier start had reached total_updates=100" in text) == (new_updates == 0)
    assert ("total_updates=150 is reached\n" in text) == (new_updates == 50)


def test_summary_names_only_commands_and_files_that_work(tmp_path: Path) -> None:
    text = summary_of(tmp_path / "short", "logs", "checkpoints/.saving-8")
    assert f"{tmp_path / 'short'} (checkpoints, logs)" in text
    assert "none was saved" in text
    assert not [word for word in ("--role evaluator", "tensorboard", "Look at") if word in text]
    blind = summary_of(tmp_path / "blind", CHECKPOINT, screen=False)
    assert "episodes=100" in blind
    assert "video=" not in blind


def test_summary_reports_the_video_of_a_simulator_or_what_it_needs(tmp_path: Path) -> None:
    assert "Video:       951.2, " in summary_of(tmp_path, CHECKPOINT, video_return=951.23, video_needs="pip install x")
    assert "\nVideo:       none; it needs pip install x\n" in summary_of(tmp_path, video_needs="pip install x")
    assert "Video: " not in summary_of(tmp_path)


@pytest.mark.parametrize("name", ["catch", "walker", "pendulum", "mountain_car", "pong_cpu"])
def test_a_game_has_a_screen_if_it_can_be_filmed(name: str) -> None:
    assert can_render(load(ROOT / "configs" / f"{name}.yaml", [])) == (name not in ("catch", "walker"))


@pytest.mark.parametrize("age_seconds", [-5, 5])
def test_summary_names_existing_pictures_but_no_video_older_than_the_newest_checkpoint(
    tmp_path: Path, age_seconds: int
) -> None:
    for name in ("checkpoints/1000", CHECKPOINT):
        (tmp_path / name).mkdir(parents=True)
    times = {"checkpoints/1000": -9, CHECKPOINT: 0, "video.mp4": -age_seconds, "curves.png": -9, "report.html": -9}
    for path, seconds in times.items():
        (tmp_path / path).touch()
        os.utime(tmp_path / path, (START + seconds, START + seconds))
    text = summary_of(tmp_path)
    shown = [name for name in ("report.html", "curves.png", "video.mp4", "video.gif") if f"{tmp_path}/{name}\n" in text]
    assert shown == ["report.html", "curves.png", "video.mp4"][: 3 if age_seconds < 0 else 2]
