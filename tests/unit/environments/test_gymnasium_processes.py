"""The processes in which environments of Gymnasium run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from apex_jax.environments.gymnasium_processes import describe
from apex_jax.environments.gymnasium_tasks import BrokenEnvironment
from apex_jax.settings import load
from tests.rigs.environments import processes_of
from tests.rigs.processes import wait_for_the_end_of

FRAMES = ("environment.frame_stack=1", "environment.frame_skip=1")


def test_environment_is_described_in_another_process_which_closes_it_and_ends_its_processes(tmp_path: Path) -> None:
    processes, closed = tmp_path / "processes", tmp_path / "closed"
    settings = f"environment.settings={{processes: {processes}, closed: {closed}}}"
    describe(load(None, ["environment.task=gymnasium:tests.rigs.environments:Simulated", settings, *FRAMES]))
    wait_for_the_end_of(*processes_of(processes))
    [leader], _ = processes_of(processes)
    assert leader != os.getpid()
    assert closed.read_text() == f"{leader}\n"


def test_environment_that_ends_its_process_when_it_is_made_is_one_line_with_the_exit_code() -> None:
    settings = ["environment.task=gymnasium:tests.rigs.environments:Dies", "environment.settings={made: true}", *FRAMES]
    with pytest.raises(BrokenEnvironment, match="ended its process, exit code 7"):
        describe(load(None, settings))
