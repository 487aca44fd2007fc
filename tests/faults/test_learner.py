"""Faults of the learner: at most one checkpoint interval is lost, and the loss is logged."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
import zmq

from apex_jax.config import AddressConfig
from apex_jax.environments.environment import segment_spec
from apex_jax.run.checkpoint import Checkpointer
from apex_jax.transport.sockets import LocalLinks
from apex_jax.workers.learner import open_learner
from apex_jax.workers.role import RoleContext
from tests.rigs.fleet import Fleet
from tests.rigs.learner_runs import bits, config_of, restored, save_checkpoint
from tests.rigs.processes import ROOT, Programs, checkpoints, wait_until

pytestmark = pytest.mark.timeout(480)


# Killed and stopped -----------------------------------------------------------------------------------------------


def test_fault_06_resumed_learner_equals_its_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    state, progress = save_checkpoint(tmp_path, updates=4000)
    links = LocalLinks()
    context = zmq.Context()
    addresses = AddressConfig((links.experience,), (links.sampling,), links.weights)
    config = config_of(tmp_path).replace(addresses=addresses)
    with open_learner(RoleContext(config, context, "learner"), segment_spec(config)) as learner:
        assert bits(learner.state) == bits(state)
        jax.tree.map(lambda ours, saved: None, learner.state, state)  # which raises where their structures differ
        assert (learner.counters.updates, learner.counters.environment_steps) == (
            progress.updates,
            progress.environment_steps,
        )
        assert learner.counters.elapsed_seconds() >= progress.elapsed_seconds
        assert learner.weights.version >= progress.weights_version
    context.term()
    links.close()


@pytest.mark.slow
def test_fault_07_sigterm_saves_what_was_learned_and_exits_143(programs: Programs, tmp_path: Path) -> None:
    fleet = Fleet(programs, tmp_path / "run", "learner.checkpoint_interval_seconds=1000000")
    learner = fleet.start("replay", "actor-0", "learner")
    learner.wait_until(lambda: fleet.updates() > 0)
    assert checkpoints(fleet.directory) == []
    known = fleet.updates()
    learner.send(signal.SIGTERM)
    assert learner.exit_code(30) == 143
    [saved] = checkpoints(fleet.directory)
    found = restored(fleet.directory)
    assert found is not None
    assert found[1].updates == int(found[0].updates) == saved >= known
    assert fleet.with_traceback() == []


SAVES = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from apex_jax.run.checkpoint import Checkpointer, Progress
checkpointer = Checkpointer(sys.argv[2], kept=2)
updates = max(checkpointer.steps, default=0)
while True:
    updates += 1
    state = {"a": np.full(200_000, updates, np.float32), "b": {"c": np.full(1000, updates, np.int32)}}
    checkpointer.save(state, Progress(updates, 0, 0.0, 0, "x", "y"))
    checkpointer.wait()
    print(updates, flush=True)
"""


def kill_amid_saves(directory: Path, rng: random.Random) -> tuple[int, int]:
    """Saves continuously in a process that is killed at a random moment; every reported save must exist.

    Returns the number of the checkpoint that is, and how many the kill has left half written.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES, str(ROOT), str(directory)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        said = int(process.stdout.readline())
        threading.Event().wait(rng.random() * 0.4)
        wait_until(lambda: halves(directory))  # at once, but for the moment between two saves
    finally:
        process.kill()
    said = int([str(said), *process.stdout.read().split()][-1])
    process.wait()
    process.stdout.close()
    left = len(halves(directory))
    checkpointer = Checkpointer(str(directory))
    like = {"a": np.zeros(200_000, np.float32), "b": {"c": np.zeros(1000, np.int32)}}
    found = checkpointer.restore_newest(like, "x", "y")
    checkpointer.close()
    assert found is not None
    assert said <= found[1].updates <= said + 1
    assert (found[0]["a"] == found[1].updates).all()
    assert (found[0]["b"]["c"] == found[1].updates).all()
    names = [path.name for path in (directory / "checkpoints").iterdir()]
    assert [name for name in names if not name.isdecimal()] == [".lock"], (
        "what is half written, or half deleted, is gone"
    )
    return found[1].updates, left


def halves(directory: Path) -> list[Path]:
    return list((directory / "checkpoints").glob(".saving*"))


@pytest.mark.parametrize("kills", [1, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_fault_09_kill_during_a_save_leaves_the_previous_checkpoint_and_no_half_one(tmp_path: Path, kills: int) -> None:
    rng = random.Random(kills)
    saved, left = zip(*(kill_amid_saves(tmp_path, rng) for _ in range(kills)), strict=True)
    assert sorted(set(saved)) == [*saved], "each goes on from the one before"
    assert sum(left) > 0, "kills that met no save show nothing"
