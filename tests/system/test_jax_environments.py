"""MinAtar, which gymnax plays in JAX, trained by real processes, evaluated, filmed and loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from apex_jax import load_policy
from tests.rigs.processes import ROOT

SHORT = ("total_updates=40", "replay.min_size_to_sample=2000", "evaluator.episodes=2", "replay.journal=false")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arguments", [
    pytest.param(("--config", "minatar"), marks=pytest.mark.ci),
    *(pytest.param(more, marks=pytest.mark.long) for more in (
        ("--config", "cartpole", "environment.task=gymnax:MountainCar-v0", "processes=one"),
        ("--config", "pendulum", "environment.task=gymnax:Pendulum-v1",
         "environment.settings={max_steps_in_episode: 50}"),
    )),
])  # fmt: skip
def test_environment_of_gymnax_is_trained_evaluated_and_loaded(arguments: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "main.py"), *arguments, *SHORT, "run_directory=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    policy = load_policy(tmp_path / "run")
    if "minatar" in arguments:
        assert (tmp_path / "run" / "video.mp4").is_file(), done.stdout
        assert policy(np.zeros((10, 10, 4), np.float32)) in (0, 1, 2)
    else:
        assert policy(np.zeros(3 if "pendulum" in arguments else 2)) is not None
