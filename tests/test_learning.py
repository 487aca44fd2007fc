"""Learning itself, held to a score: `python -m pytest -m slow tests/test_learning.py`, on a machine that idles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, values

MINUTES = 20
SCORE = 5.0  # the published seeds were at 20.0, 19.1 and 14.2 then, see results/


@pytest.mark.slow
@pytest.mark.timeout((MINUTES + 8) * 60)
def test_pong_is_won_after_20_minutes_on_2_cores(tmp_path: Path) -> None:
    limits = [f"total_minutes={MINUTES}", f"run_directory={tmp_path / 'run'}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, str(ROOT / "main.py"), *limits], check=True, cwd=tmp_path, env=environment)
    returns = values(tmp_path / "run", "evaluator", "eval/episodic_return")
    assert returns[0] < -19, "the first evaluation is of an untrained network"
    assert returns[-1] >= SCORE
    assert (tmp_path / "run" / "curves.png").exists()
    assert (tmp_path / "run" / "video.mp4").stat().st_size > 10_000
