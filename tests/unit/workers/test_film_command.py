"""The command film: an episode in the task's own simulator, with its frames, its return and its errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import av
import envpool
import numpy as np
import pytest

from apex_jax.host.errors import RunError, UsageError
from apex_jax.run.evaluations import return_text
from apex_jax.run.metrics import read_metrics
from apex_jax.workers import film_command
from apex_jax.workers.film_command import Simulator, envpool_name, film
from tests.rigs.saved_runs import save_best, save_run


@pytest.mark.parametrize(("names", "task"), [
    (("walker", "walk"), "WalkerWalk-v1"), (("ball_in_cup", "catch"), "BallInCupCatch-v1"),
    (("humanoid_CMU", "run"), "HumanoidCMURun-v1"), (("lqr", "lqr_2_1"), "LqrLqr21-v1"),
])  # fmt: skip
def test_names_of_dm_control_become_those_of_envpool(names: tuple[str, str], task: str) -> None:
    assert envpool_name(*names) == task
    assert task in envpool.list_all_envs()


def frames_of(path: Path) -> tuple[int, float]:
    """Returns how many frames a video has, and how many are shown a second."""
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0)), float(container.streams.video[0].average_rate or 0)


@pytest.mark.parametrize(("steps_per_second", "steps", "frames", "rate"), [(20, 3, 4, 20), (100, 6, 3, 25)])
def test_fast_tasks_are_drawn_at_up_to_30_frames_a_second_and_at_their_end(
    tmp_path: Path, steps_per_second: float, steps: int, frames: int, rate: float
) -> None:
    actions: list[Any] = []

    def step(action: np.ndarray) -> tuple[int, float, bool]:
        actions.append(action)
        return len(actions), 1.5, len(actions) == steps

    simulator = Simulator(steps_per_second, lambda: 0, step, lambda: np.zeros((480, 480, 3), np.uint8))
    assert film(simulator, np.asarray, tmp_path / "video") == 1.5 * steps
    assert actions == list(range(steps)), "each is chosen for the newest observation"
    assert frames_of(tmp_path / "video.mp4") == (frames, rate)


@pytest.fixture(autouse=True)
def _keep_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which the command sets
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.chdir(tmp_path)  # which it leaves


@pytest.mark.parametrize("part", ["", "/best"])
def test_film_of_a_run_is_written_into_it_with_the_return(
    capfd: pytest.CaptureFixture[str], part: str, tmp_path: Path
) -> None:
    config = save_run("Pendulum-v1", tmp_path / "run")
    save_best(config, updates=2)
    assert film_command.run([f"run{part}"]) == 0
    files = [tmp_path / "run" / name for name in ("video.mp4", "video.gif")]
    line = capfd.readouterr().out.splitlines()[-1]
    [written] = read_metrics(tmp_path / "run" / "metrics" / "evaluator.jsonl")
    assert written["step"] == 20
    assert line.startswith(f"return {return_text(written['eval/film_return'])} in the task's own simulator")
    assert line.endswith(f": {files[0]} and {files[1]}")
    assert frames_of(files[0]) == (201, 30)
    assert files[1].is_file()


@pytest.mark.parametrize(("task", "words"), [
    ("WalkerWalk-v1", ["dm_control", "requirements-film.txt", "libegl1"]),
    ("Catch-v0", ["Catch-v0 cannot be filmed"]),
])  # fmt: skip
def test_failure_is_one_line_and_leaves_no_film(
    task: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(task, tmp_path / "run", (1,))
    monkeypatch.setitem(sys.modules, "dm_control", None)  # as if it were not installed
    with pytest.raises(RunError) as raised:
        film_command.run(["run"])
    assert [word for word in words if word not in str(raised.value)] == []
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "run").glob("video*"))
    with pytest.raises(UsageError):
        film_command.run([])
