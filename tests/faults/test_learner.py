"""Faults of the learner: at most one checkpoint interval is lost, and the loss is logged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zmq

from apex_jax.config import AddressConfig
from apex_jax.environments.environment import describe
from apex_jax.run.checkpoint import Checkpointer
from apex_jax.transport.sockets import LocalLinks
from apex_jax.workers.learner import open_learner
from apex_jax.workers.role import RoleContext
from tests.rigs.agents import assert_equal_bits
from tests.rigs.learner_runs import config_of, save_checkpoint
from tests.rigs.processes import ROOT, wait_until

pytestmark = pytest.mark.timeout(480)


# Killed and stopped -----------------------------------------------------------------------------------------------


def test_fault_06_resumed_learner_equals_its_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    state, progress = save_checkpoint(tmp_path, updates=4000)
    links = LocalLinks()
    context = zmq.Context()
    addresses = AddressConfig(links.experience, links.sampling, links.weights)
    config = config_of(tmp_path).replace(addresses=addresses)
    with open_learner(RoleContext(config, context, "learner"), describe(config)) as learner:
        assert_equal_bits(learner.state, state)
        assert (learner.counters.updates, learner.counters.environment_steps) == (
            progress.updates,
            progress.environment_steps,
        )
        assert learner.counters.elapsed_seconds() >= progress.elapsed_seconds
        assert learner.weights.version >= progress.weights_version
    context.term()
    links.close()


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
    checkpointer._join()
    print(updates, flush=True)
"""


def test_fault_09_kill_during_a_save_leaves_the_previous_checkpoint_and_no_half_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    command = [sys.executable, "-c", SAVES, str(ROOT), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            wait_until(lambda: list(folder.glob(".saving*")))
        finally:
            process.kill()
        last = int([said, *process.stdout.read().split()][-1])
    assert list(folder.glob(".saving*")), "a kill that met no save shows nothing"
    checkpointer = Checkpointer(str(tmp_path))
    like = {"a": np.zeros(200_000, np.float32), "b": {"c": np.zeros(1000, np.int32)}}
    found = checkpointer.restore_newest(like, "x", "y")
    checkpointer.close()
    assert found is not None
    assert last <= found[1].updates <= last + 1, "what was reported exists"
    assert (found[0]["a"] == found[1].updates).all()
    assert (found[0]["b"]["c"] == found[1].updates).all()
    assert [path.name for path in folder.iterdir() if not path.name.isdecimal()] == [".lock"], "the half one is gone"
