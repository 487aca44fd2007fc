"""Videos: every frame of a game, in colour, in files that players and browsers open."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import av
import jax
import numpy as np
import pytest
from PIL import Image, ImageSequence

from apex_jax.agent.dqn import make_dqn
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.host.errors import RunError, UsageError
from apex_jax.host.program import CONFIGS
from apex_jax.plotting.video import video_paths, video_writer
from apex_jax.process import StopSignal
from apex_jax.run.checkpoint import Checkpointer, Progress
from apex_jax.run.metrics import MetricsWriter
from apex_jax.transport.params_codec import architecture_of
from apex_jax.workers import evaluator, local, recording
from apex_jax.workers.evaluator import Evaluator
from apex_jax.workers.film_command import FILM_EXTRA
from apex_jax.workers.recording import Film, check_video, draw_curves, film_in_simulator
from tests.rigs.recordings import PONG


def film_at(path: Path, config: Config) -> Film:
    return Film(config.replace(evaluator=replace(config.evaluator, video=str(path))), describe(config))


def record(config: Config, path: Path) -> Film:
    environment_spec = describe(config)
    dqn = make_dqn(config, environment_spec.spec)
    params = dqn.init(jax.random.key(0)).online_params
    with film_at(path, config) as film:
        if Evaluator(config, environment_spec, dqn, filmed=True).evaluate(params, lambda: False, film.add) is not None:
            film.complete(0.0)
    return film


def frames_of(path: Path) -> tuple[np.ndarray, float]:
    """Returns the frames of a video, uint8[N, height, width, 3], and how many are shown a second."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return np.stack(frames), float(stream.average_rate or 0)


@pytest.mark.long
def test_game_is_recorded_in_raw_colours_at_the_speed_of_the_console(tmp_path: Path) -> None:
    film = record(load(None, PONG), tmp_path / "game")
    assert film.paths == [tmp_path / "game.mp4", tmp_path / "game.gif"]
    frames, rate = frames_of(tmp_path / "game.mp4")
    assert frames.shape == (40, 420, 320, 3)  # 160 emulator frames, 4 to a step; the screen twice as large
    assert rate == 15
    assert abs(frames[-1, 200, 100].astype(int) - (144, 72, 17)).max() < 12  # Pong's brown, as far as H.264 keeps it
    with Image.open(tmp_path / "game.gif") as image:
        assert image.size == (160, 210)
        milliseconds = [frame.info["duration"] for frame in ImageSequence.Iterator(image)]
        assert sum(milliseconds) == pytest.approx(40 * 1000 / 15, rel=0.05)  # pictures that are equal stand as one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["game.gif", "game.mp4"]


def test_without_the_extra_video_the_film_is_an_animation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with video_writer(tmp_path / "game", Fraction(30)) as add:
        add(np.zeros((40, 40, 3), np.uint8))
    assert [path.name for path in tmp_path.iterdir()] == ["game.gif"]
    with pytest.raises(UsageError, match=r"game\.mp4: needs `pip install -r requirements-video\.txt`; run it, or"):
        video_paths(tmp_path / "game.mp4")


@pytest.mark.long
@pytest.mark.parametrize(("video", "film"), [("game.gif", "run/game.gif"), ("films/game.gif", "films/game.gif")])
def test_film_of_a_checkpoint_is_in_the_run_directory_unless_its_name_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, video: str, film: str
) -> None:
    config = load(None, PONG)
    state = make_dqn(config, describe(config).spec).init(jax.random.key(0))
    checkpointer = Checkpointer(str(tmp_path / "run"))
    architecture = architecture_of(state.online_params)
    checkpointer.save(state, Progress(1, 1, 0.0, 1, config.checkpoint_compatibility_key, architecture))
    checkpointer.close()
    (tmp_path / "films").mkdir()
    monkeypatch.chdir(tmp_path)
    of_checkpoint = load(None, [*PONG, "evaluator.checkpoint=run", f"evaluator.video={video}", "evaluator.episodes=1"])
    assert evaluator.run(of_checkpoint, "evaluator", StopSignal()) == 0
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.gif")] == [film]


@pytest.mark.parametrize("role", [evaluator, local])
@pytest.mark.parametrize(("file", "why"), [
    ("catch", "Catch-v0 has no screen"),
    ("walker", "EnvPool shows no screen of WalkerWalk-v1, but `python main.py film RUN` plays it"),
])  # fmt: skip
def test_video_of_a_game_without_a_screen_is_refused(tmp_path: Path, role: ModuleType, file: str, why: str) -> None:
    config = load(CONFIGS / f"{file}.yaml", [f"run_directory={tmp_path / 'run'}", "evaluator.video=x.mp4"])
    with pytest.raises(UsageError, match=rf"^evaluator\.video=x\.mp4: {why}"):
        role.run(config, "name", StopSignal())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("file", ["mountain_car", "cartpole", "pong_cpu"])
def test_video_of_a_game_that_a_run_films_is_accepted(file: str) -> None:
    config = load(CONFIGS / f"{file}.yaml", ["evaluator.video=x.mp4"])
    check_video(config, describe(config))


PROGRAMS = {  # what stands for the command film -> the line of the summary
    "print('Hello'); print('return 4.5 in it: video.mp4'); print('bye')": "return 4.5 in it: video.mp4",
    "print('error: no\\x1b EGL'); raise SystemExit(1)": r"'none; no\\x1b EGL'",
    "import os; os.abort()": r"none; the command film ended with exit code -6, see .*logs/film\.log",
    "import time; time.sleep(600)": "none; the command film ended with exit code -9, see .*",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_run_of_mujoco_ends_with_a_line_about_its_film(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    config = load(CONFIGS / "walker.yaml", [f"run_directory={tmp_path}"])
    monkeypatch.setattr(recording, "FILM_SECONDS", 2.0)
    monkeypatch.setattr(recording, "command", lambda: [sys.executable, "-c", program])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert film_in_simulator(config, StopSignal()) == f"none; it needs {FILM_EXTRA}"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert re.fullmatch(PROGRAMS[program], film_in_simulator(config, StopSignal()) or "")
    stop = StopSignal()
    stop.set()
    assert film_in_simulator(config, stop) == ""
    assert film_in_simulator(load(CONFIGS / "catch.yaml"), StopSignal()) is None


def test_curves_of_a_run_are_drawn_into_its_directory_once_a_game_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    draw_curves(tmp_path, "Pong-v5")  # there are no metrics
    MetricsWriter(str(tmp_path), "learner").write(4000, {"learner/updates": 8.0})
    draw_curves(tmp_path, "Pong-v5")
    assert caplog.text.count("no curves.png: ") == 2
    assert not (tmp_path / "curves.png").exists()
    MetricsWriter(str(tmp_path), "evaluator").write(4000, {"eval/episodic_return": -20.0})
    draw_curves(tmp_path, "Pong-v5")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_video_error_ends_the_film_and_not_the_game(tmp_path: Path) -> None:
    with film_at(tmp_path / "nowhere" / "game", load(None)) as film:
        for _ in range(3):
            film.add(np.zeros((20, 20, 3), np.uint8))
        with pytest.raises(RunError, match="is not written: "):
            film.complete(0.0)
    assert film.paths == []


@pytest.mark.parametrize("screens", [1, 3])
def test_unfinished_film_leaves_the_old_video(tmp_path: Path, screens: int) -> None:
    (tmp_path / "game.gif").write_bytes(b"of before")
    with film_at(tmp_path / "game", load(None)) as film:
        for _ in range(screens):
            film.add(np.zeros((20, 20, 3), np.uint8))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"of before"]
