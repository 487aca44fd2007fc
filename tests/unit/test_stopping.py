"""Ctrl-C is acknowledged at once; a second one ends the run at once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from apex_jax.process import SUPERVISED
from tests.rigs.processes import ROOT, Program, Programs, catch, free_tcp_addresses, wait_until

pytestmark = pytest.mark.timeout(480)

BY_HAND = {SUPERVISED: "", "PYTHONPATH": str(ROOT)}
STOPPING = "stopping: saving a checkpoint; Ctrl-C again to stop without\n"
SAVES_FOR_EVER = """
import pathlib, signal, sys, threading
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
name = sys.argv[sys.argv.index("--name") + 1]
(pathlib.Path(sys.argv[1]) / f"{name}.ready").touch()
threading.Event().wait(120)
"""
SUPERVISOR = """
import sys
from apex_jax import process
from apex_jax.workers import local
process.SAME_PRESS_SECONDS = process.SAME_REQUEST_SECONDS = 0.0
local.COMMAND = [sys.executable, {main!r}]
"""


def supervisor_of_roles_that_save_for_ever(programs: Programs, folder: Path) -> Program:
    """Returns a local run whose roles ignore each signal, once all of them do."""
    run = folder / "run"
    (folder / "main.py").write_text(SAVES_FOR_EVER.replace("sys.argv[1]", repr(str(run))))
    lines = SUPERVISOR.format(main=str(folder / "main.py"))
    program = programs.start(*catch(run), lines=lines, environment=BY_HAND)
    program.wait_until(lambda: len(list(run.glob("*.ready"))) == 4)
    return program


def test_fault_08_a_stop_is_acknowledged_at_once_and_a_second_one_ends_every_process(
    programs: Programs, tmp_path: Path
) -> None:
    program = supervisor_of_roles_that_save_for_ever(programs, tmp_path)
    program.send(signal.SIGINT)
    program.wait_until(lambda: STOPPING in program.stderr, 10)
    assert len(programs.living()) == 5
    program.send(signal.SIGINT)
    assert program.exit_code(30) == 130
    wait_until(lambda: not programs.living(), 5.0)
    assert program.stderr.endswith(STOPPING)


@pytest.mark.long
def test_single_learner_acknowledges_ctrl_c_too(programs: Programs, tmp_path: Path) -> None:
    hangs = (
        "import time\nfrom apex_jax import process\nfrom apex_jax.run import checkpoint\n"
        "from apex_jax.workers.run_counters import RunCounters\n"
        "process.SAME_PRESS_SECONDS = 0.0\n"
        "checkpoint.write_checksums = lambda step: (print('saving', flush=True), time.sleep(600))\n"
        "def learn(counters, best_return):\n    counters.updates = 2\n    print('learning', flush=True)\n"
        "RunCounters.limit_reached = learn\n"
    )
    arguments = catch(tmp_path, *free_tcp_addresses())
    program = programs.start("--role", "learner", *arguments, lines=hangs, environment=BY_HAND)
    program.wait_until(lambda: "learning" in program.stdout)
    program.send(signal.SIGINT)
    program.wait_until(lambda: "saving" in program.stdout)
    assert STOPPING in program.stderr
    program.send(signal.SIGINT)
    assert program.exit_code(30) == 130
