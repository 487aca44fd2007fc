"""Learning reaches its score: `python -m pytest -m slow tests/system/test_learning.py`, on an idle machine.

A run ends when it is good enough; what it does until its own end is in results/.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from apex_jax.plotting.curves import read_run
from tests.rigs.processes import ROOT

CPU_ONLY = {**os.environ, "JAX_PLATFORMS": "cpu"}
MINUTES = 20  # the default's
SCORE = 18.0  # of 21, the mean of 10 games; four of five published seeds have it after 12 minutes, see results/


@pytest.mark.slow
@pytest.mark.timeout((MINUTES + 10) * 60)
def test_pong_is_won_within_20_minutes_on_2_cores(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "main.py"), "seed=3", f"evaluator.stop_at_return={SCORE}"]
    subprocess.run(command, check=True, cwd=tmp_path, env=CPU_ONLY)
    directory = tmp_path / "runs" / "Pong-v5-3"
    _, minutes, returns = read_run(directory).evaluation
    assert returns[0] < -19, "the first evaluation is of an untrained network"
    assert returns[minutes <= MINUTES].max() >= SCORE
    assert (directory / "curves.png").exists()
    assert (directory / "video.mp4").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("arguments", "minutes", "score"), [
    (["--config", "pendulum", "total_updates=0"], 2, -200.0),
    (["--config", "walker", "environment.task=CartpoleSwingup-v1"], 5, 800.0),
])  # fmt: skip
def test_continuous_control_is_learned_in_minutes_on_2_cores(
    tmp_path: Path, arguments: list[str], minutes: float, score: float
) -> None:
    limits = f"total_minutes={minutes}", f"evaluator.stop_at_return={score}"
    command = [sys.executable, str(ROOT / "main.py"), *arguments, *limits, "run_directory=run"]
    subprocess.run(command, check=True, cwd=tmp_path, env=CPU_ONLY)
    _, elapsed, returns = read_run(tmp_path / "run").evaluation
    assert returns[elapsed <= minutes].max() >= score
    assert (tmp_path / "run" / "curves.png").exists()
