"""Faults of checkpoints and their disk: nothing wrong is ever restored."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from apex_jax.run.checkpoint import Checkpointer, CheckpointError, Progress
from tests.rigs.fleet import Fleet
from tests.rigs.learner_runs import bits, error_lines, files, save_checkpoint
from tests.rigs.processes import ROOT, Programs, catch, checkpoints, free_tcp_addresses, values

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
    checkpointer.wait()
    checkpointer.close()
    return tmp_path


def assert_right_or_refused(directory: Path) -> bool:
    """Returns whether the checkpoint was restored, and checks the result."""
    try:
        found = Checkpointer(str(directory), read_only=True).restore_newest(LIKE, "compatibility_key", "architecture")
    except CheckpointError as error:
        assert str(error).isprintable()
        return False
    assert found is not None
    assert bits(found[0]) == bits(SAVED)
    assert found[1] == PROGRESS
    return True


@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_fault_10_no_flipped_or_missing_byte_causes_a_wrong_restore(small: Path, stride: int) -> None:
    refused = tried = 0
    for path in sorted(path for path in (small / "checkpoints").rglob("*") if path.is_file()):
        sound = path.read_bytes()
        for place in range(0, len(sound), stride):
            flipped = sound[:place] + bytes([sound[place] ^ (1 << place % 8)]) + sound[place + 1 :]
            for damaged in (flipped, sound[:place]):
                path.write_bytes(damaged)
                refused += not assert_right_or_refused(small)
                tried += 1
        path.write_bytes(sound)
    assert assert_right_or_refused(small)
    assert refused > 0.99 * tried, "all but flips within the checksums' own file that change none of them"


@pytest.mark.long
def test_fault_10_when_all_are_damaged_the_learner_ends_with_one_line(programs: Programs, tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    for path in (tmp_path / "checkpoints" / "1").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    learner = programs.start("--role", "learner", *catch(tmp_path, *free_tcp_addresses()))
    assert learner.exit_code() == 1
    [error] = error_lines(learner)
    assert "can be read; move it away to start afresh" in error
    assert "Traceback" not in learner.stderr
    assert "Event loop" not in learner.stderr


@pytest.mark.long
def test_fault_11_checkpoint_of_another_game_is_refused_and_unchanged(programs: Programs, tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    before = files(tmp_path / "checkpoints")
    learner = programs.start(
        "--role", "learner", *catch(tmp_path, *free_tcp_addresses(), "environment.task=CartPole-v1")
    )
    assert learner.exit_code() == 1
    [error] = error_lines(learner)
    assert "checkpoints/1 has a different" in error
    assert "Traceback" not in learner.stderr
    assert files(tmp_path / "checkpoints") == before
    assert not (tmp_path / "config.yaml").exists(), "that of the run is not replaced by one that was refused"


# Disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose checkpoints are on a small disk."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    with suppress(OSError):
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            yield place
            while os.path.ismount(place):
                subprocess.run(["umount", "-l", str(place)], check=True)
            return
    pytest.skip("needs the right to mount")


@pytest.mark.slow
def test_fault_12_training_goes_on_with_a_full_or_a_read_only_disk_until_there_is_room(
    programs: Programs, tmp_path: Path, small_disk: Path
) -> None:
    fleet = Fleet(programs, tmp_path / "run", "network.hidden_units=1024", "learner.checkpoint_interval_seconds=1")
    learner = fleet.start("replay", "actor-0", "learner")

    def failed() -> float:
        return fleet.newest("learner", "learner/failed_checkpoints", 0.0)

    learner.wait_until(lambda: failed() >= 2)
    assert checkpoints(fleet.directory) == []
    known = fleet.updates()
    learner.wait_until(lambda: fleet.updates() > known)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    learner.wait_until(lambda: checkpoints(fleet.directory))
    assert "checkpoints are saved again" in learner.stderr
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(small_disk)], check=True)  # before the other
    before, known = failed(), fleet.updates()
    learner.wait_until(lambda: failed() > before and fleet.updates() > known)
    subprocess.run(["umount", str(small_disk)], check=True)
    held = checkpoints(fleet.directory)
    learner.wait_until(lambda: checkpoints(fleet.directory)[-1] > held[-1])
    learner.send(signal.SIGTERM)
    assert learner.exit_code(30) == 143
    assert "Traceback" not in learner.stderr
    assert not list(small_disk.glob(".saving*"))


LIMITED = """
import contextlib, resource, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from apex_jax.run.checkpoint import Checkpointer, CheckpointError, Progress
checkpointer = Checkpointer(sys.argv[2])
state = {"a": np.random.default_rng(0).random(100_000)}
for updates, limit in ((1, resource.RLIM_INFINITY), (2, 50_000), (3, 0), (4, resource.RLIM_INFINITY)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    checkpointer.save(state, Progress(updates, 0, 0.0, 0, "x", "y"))
    with contextlib.suppress(CheckpointError):
        checkpointer.wait()
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
