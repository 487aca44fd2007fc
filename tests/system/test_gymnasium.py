"""Environments of a user, trained by the whole program; what the user sees of those that fail."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.rigs.environments import processes_of
from tests.rigs.processes import ROOT, Program, Programs, wait_for_the_end_of

SECONDS = 300.0
ERROR = re.compile(r"ValueError: the (made|step) failed \(.*/tests/rigs/environments\.py, line \d+\)")


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def train(programs: Programs, directory: Path, name: str, *settings: str) -> Program:
    """Trains a little on an environment of the rig."""
    small = ("actor.environments=2", "evaluator.episodes=2", "replay.min_size_to_sample=500", "total_updates=200")
    task = f"environment.task=gymnasium:tests.rigs.environments:{name}"
    arguments = ("--config", str(ROOT / "configs" / "cartpole.yaml"), f"run_directory={directory}", *small, task)
    return programs.start(*arguments, *settings, environment={"PYTHONPATH": str(ROOT)})


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("at", ["step", "made"])
def test_environment_that_always_fails_ends_the_run_with_one_line_and_a_traceback_in_the_log(
    at: str, programs: Programs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with programs:
        program = train(programs, run, "Raises", f"environment.settings={{at: {at}, step: 30}}")
        assert program.exit_code(SECONDS) == 1
    assert ERROR.search(program.stderr.splitlines()[-1])
    assert "Traceback" in (program.stderr if at == "made" else (run / "logs" / "actor-0.log").read_text())


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("end", ["normal", signal.SIGINT, signal.SIGKILL])
def test_environments_are_closed_and_their_processes_end_with_the_run(
    end: str | signal.Signals, programs: Programs, tmp_path: Path
) -> None:
    started, closed = tmp_path / "processes", tmp_path / "closed"
    settings = [f"environment.settings={{processes: {started}, closed: {closed}}}"]
    with programs:
        program = train(
            programs, tmp_path / "run", "Simulated", *settings, "total_updates=20", "evaluator.max_episode_frames=100"
        )
        if isinstance(end, signal.Signals):
            evaluations = tmp_path / "run" / "evaluations.jsonl"
            program.wait_until(evaluations.exists)
            program.send(end)
        code = program.exit_code(SECONDS)
        assert code == {"normal": 0, signal.SIGINT: 130, signal.SIGKILL: -9}[end], program.stderr
        leaders, processes = processes_of(started)
        wait_for_the_end_of(leaders, processes)
        assert set(leaders) == set(map(int, closed.read_text().split()))
        assert len(leaders) >= 2 + 2 + 3  # of the actor, of the evaluator, and of roles that read the spaces
