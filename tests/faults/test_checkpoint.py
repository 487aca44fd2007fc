"""Faults of checkpoints and their disk: nothing wrong is ever restored."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from apex_jax.run.checkpoint import Checkpointer, Progress
from apex_jax.run.checkpoint_files import CheckpointError
from tests.rigs.agents import assert_equal_bits
from tests.rigs.processes import ROOT, Programs, catch, values

pytestmark = pytest.mark.timeout(480)


# Damaged files ----------------------------------------------------------------------------------------------------

LIKE = {"a": np.zeros(5, np.float32), "b": np.zeros((), np.int32)}
SAVED = {"a": np.arange(5, dtype=np.float32) + 1, "b": np.array(7, np.int32)}
PROGRESS = Progress(7, 8, 9.5, 10, "compatibility_key", "architecture")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """One small checkpoint."""
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(SAVED, PROGRESS)
    checkpointer.close()
    assert checkpointer.error is None
    return tmp_path


def assert_right_or_refused(directory: Path) -> bool:
    """Returns whether the checkpoint was restored, and checks the result."""
    try:
        found = Checkpointer(str(directory), read_only=True).restore_newest(LIKE, "compatibility_key", "architecture")
    except CheckpointError as error:
        assert str(error).isprintable()
        return False
    assert found is not None
    assert_equal_bits(found[0], SAVED)
    assert found[1] == PROGRESS
    return True


def test_fault_10_no_flipped_or_missing_byte_causes_a_wrong_restore(small: Path) -> None:
    refused = tried = 0
    for path in sorted(path for path in (small / "checkpoints").rglob("*") if path.is_file()):
        sound = path.read_bytes()
        for place in range(0, len(sound), 61):
            flipped = sound[:place] + bytes([sound[place] ^ (1 << place % 8)]) + sound[place + 1 :]
            for damaged in (flipped, sound[:place]):
                path.write_bytes(damaged)
                refused += not assert_right_or_refused(small)
                tried += 1
        path.write_bytes(sound)
    assert assert_right_or_refused(small)
    assert refused > 0.99 * tried, "all but flips within the checksums' own file that change none of them"


# Disks ------------------------------------------------------------------------------------------------------------


LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from apex_jax.run.checkpoint import Checkpointer, Progress
checkpointer = Checkpointer(sys.argv[2])
state = {"a": np.random.default_rng(0).random(100_000)}
for updates, limit in ((1, resource.RLIM_INFINITY), (2, 50_000), (3, 0), (4, resource.RLIM_INFINITY)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    checkpointer.save(state, Progress(updates, 0, 0.0, 0, "x", "y"))
    checkpointer._join()
    print(checkpointer.steps, checkpointer.failed_saves, len(list(checkpointer.directory.glob(".*-*"))), flush=True)
checkpointer.close()
"""


@pytest.mark.long
def test_fault_12_a_file_that_may_not_grow_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1] 0 0", "[1] 1 0", "[1] 2 0", "[1, 4] 2 0"]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "reason"), [
    (
        ("total_updates=100000000", "learner.failed_checkpoints_limit=2", "learner.checkpoint_interval_seconds=1"),
        "fatal: 2 checkpoints in a row",
    ),
    (("total_minutes=0.3",), "fatal: the last updates are lost"),
], ids=["limit", "last save"])  # fmt: skip
def test_fault_13_a_run_that_cannot_save_ends_with_1_and_is_not_started_again(
    programs: Programs, tmp_path: Path, settings: tuple[str, ...], reason: str
) -> None:
    directory = tmp_path / "run"
    local = programs.start(*catch(directory, *settings))
    local.wait_until(lambda: any(values(directory, "learner", "learner/updates")))
    shutil.rmtree(directory / "checkpoints")
    (directory / "checkpoints").touch()
    assert local.exit_code() == 1
    assert reason in local.stderr
    assert "starting it again" not in local.stderr
    assert programs.living() == {}
