"""Ctrl-C is acknowledged at once; a second one ends the run at once, and a line describes what is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from apex_jax.operations.stopping import lost_transitions, lost_updates
from apex_jax.process import SUPERVISED
from tests.rigs.processes import ROOT, Program, Programs, catch, free_tcp_addresses, wait_until

pytestmark = pytest.mark.timeout(480)

BY_HAND = {SUPERVISED: "", "PYTHONPATH": str(ROOT)}
STOPPING = "stopping: saving a checkpoint; Ctrl-C again to stop without\n"
SAVES_FOR_EVER = """
import pathlib, signal, sys, threading
from apex_jax.run.metrics import MetricsWriter
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
name = sys.argv[sys.argv.index("--name") + 1]
if name == "learner":
    MetricsWriter(sys.argv[1], name).write(20_000, {"learner/updates": 5000, "charts/updates_per_second": 9.0})
(pathlib.Path(sys.argv[1]) / f"{name}.ready").touch()
threading.Event().wait(120)
"""
SUPERVISOR = """
import sys
from apex_jax import process
from apex_jax.workers import local, role_process
process.SAME_PRESS_SECONDS = process.SAME_REQUEST_SECONDS = 0.0
role_process.COMMAND = [sys.executable, {main!r}]
"""


def supervisor_of_roles_that_save_for_ever(programs: Programs, folder: Path) -> Program:
    """Returns a local run whose roles ignore each signal, once all of them do, and the learner's metrics are read."""
    run = folder / "run"
    (folder / "main.py").write_text(SAVES_FOR_EVER.replace("sys.argv[1]", repr(str(run))))
    lines = SUPERVISOR.format(main=str(folder / "main.py")) + "from apex_jax.operations import live_view\n"
    lines += "live_view.PLAIN_INTERVAL_SECONDS = 0.0\n"
    program = programs.start(*catch(run), lines=lines, environment=BY_HAND)
    program.wait_until(lambda: len(list(run.glob("*.ready"))) == 4)
    program.wait_until(lambda: "updates 5,000" in program.stdout)
    return program


def test_fault_08_a_stop_is_acknowledged_at_once_and_a_second_one_ends_every_process_and_prints_what_is_lost(
    programs: Programs, tmp_path: Path
) -> None:
    program = supervisor_of_roles_that_save_for_ever(programs, tmp_path)
    (tmp_path / "run" / "checkpoints" / "4000").mkdir(parents=True)
    program.send(signal.SIGINT)
    program.wait_until(lambda: STOPPING in program.stderr, 10)
    assert len(programs.living()) == 5
    program.send(signal.SIGINT)
    assert program.exit_code(30) == 130
    wait_until(lambda: not programs.living(), 5.0)
    lost = "stopped at once: the updates since the checkpoint at update 4,000 are lost (the run was at about 5,000)"
    assert f"{STOPPING}{lost}; no transition that the replay server has stored is lost" in program.stderr
    assert "Traceback" not in program.stderr


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
    assert program.stderr.endswith("stopped at once: all 2 updates are lost, since no checkpoint had been saved\n")


@pytest.mark.parametrize(("updates", "is_saved", "saved", "text"), [
    (0, False, None, "no update had been made"),
    (900, False, None, "all 900 updates are lost, since no checkpoint had been saved"),
    (900, False, 1200, "the updates since the checkpoint at update 1,200 are lost"),
    (1500, False, 1200, "the updates since the checkpoint at update 1,200 are lost (the run was at about 1,500)"),
    (1500, True, 1500, "no update is lost, the checkpoint at update 1,500 is saved"),
])  # fmt: skip
def test_losses_of_a_stop_without_saving_are_printed(
    tmp_path: Path, updates: int, is_saved: bool, saved: int | None, text: str
) -> None:
    if saved:
        for name in ("800", str(saved), ".saving-9000", "damaged-9000-1"):
            (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert lost_updates(str(tmp_path), updates, is_saved) == f"stopped at once: {text}"
    assert "no transition" in lost_transitions(has_journal=True)
    assert "replay.journal=false" in lost_transitions(has_journal=False)
