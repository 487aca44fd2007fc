"""Snapshots restore the very state that was saved, the one before if the newest is damaged, and no other journal."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from apex_jax.environments.environment import segment_spec
from apex_jax.host import disk
from apex_jax.replay import journal, snapshots
from apex_jax.replay.snapshots import FileHeader, JournalError
from tests.rigs.journals import World, config_of, files, flip, wait_for_snapshots, warnings
from tests.rigs.links import CONFIG


def test_fault_10_damaged_snapshot_is_logged_and_the_previous_one_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    world.store(1)
    world.learn(1, 9.0)
    world.save()
    world.store(2)
    world.learn(1, 99.0)
    world.save()
    world.kill()
    flip(files(tmp_path, "snapshot")[-1], -1)
    world = World(tmp_path)
    assert (world.numbers(), max(world.leaves()[1]), world.ledger.steps) == ([1, 2], 9.0**0.6, 20)
    assert len(warnings(caplog)) == 1
    world.save()
    sound = files(tmp_path, "snapshot")
    assert [path.name for path in sound] == ["snapshot-000000000001", "snapshot-000000000002"]
    world.kill()
    World(tmp_path).kill()
    assert warnings(caplog) == []


def test_a_snapshot_is_due_after_its_interval_and_when_the_log_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)

    def snapshots_at(now_seconds: float) -> int:
        world.snapshot_if_due(now_seconds)
        wait_for_snapshots()
        return len(files(tmp_path, "snapshot"))

    world.store(1)
    assert snapshots_at(59.0) == 0
    assert snapshots_at(60.0) == 1
    monkeypatch.setattr(journal, "LOG_BYTES_AT_MOST", 100)
    assert snapshots_at(120.0) == 2
    world.store(2)
    files(tmp_path, "snapshot")[0].unlink()
    assert snapshots_at(121.0) == 2
    world.kill()


@pytest.mark.parametrize("call", ["os.fsync", "os.replace", "disk.open_regular", "snapshots.crc32"])
def test_failed_snapshot_leaves_no_half_file_and_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def fail(*_: object) -> None:
        if call == "snapshots.crc32":
            raise MemoryError
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    world = World(tmp_path)
    world.store(1)
    world.save()
    kept = files(tmp_path, "snapshot")
    world.learn(1, 9.0)
    module, _, name = call.partition(".")
    monkeypatch.setattr({"os": os, "disk": disk, "snapshots": snapshots}[module], name, fail)
    for _ in range(3):
        world.save()
    assert world.journal.metrics()["replay/journal_errors"] == 3
    assert files(tmp_path, "snapshot") == kept
    assert len(warnings(caplog)) == 1
    monkeypatch.undo()
    world.stop()
    world = World(tmp_path)
    assert max(world.leaves()[1]) == 9.0**0.6
    world.kill()


@pytest.mark.parametrize("kept", ["segments", "snapshot"])
def test_fault_11_journal_of_another_configuration_is_refused_and_unchanged(tmp_path: Path, kept: str) -> None:
    world = World(tmp_path)
    world.store(1)
    world.stop()
    for path in (tmp_path / "replay").glob("s*"):
        if not path.name.startswith(kept):
            path.unlink()
    before = {path.name: path.read_bytes() for path in (tmp_path / "replay").iterdir()}
    other = config_of(tmp_path).replace(environment=replace(CONFIG.environment, task="Catch-v0"))
    with pytest.raises(
        JournalError, match=r"environment.task: was Pong-v5, now Catch-v0; .*another run_directory, or move .*/replay"
    ):
        World(tmp_path, config=other)
    assert {path.name: path.read_bytes() for path in (tmp_path / "replay").iterdir()} == before


def test_a_journal_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    monkeypatch.setattr("apex_jax.replay.snapshots.FORMAT", 9)
    world.store(1)
    world.kill()
    monkeypatch.undo()
    with pytest.raises(JournalError, match="has format 9, this release reads format 4"):
        World(tmp_path)


def test_a_journal_from_before_a_key_or_action_masks_existed_is_accepted() -> None:
    spec = segment_spec(CONFIG)
    before = FileHeader("task=gymnasium:X frame_stack=1", spec).facts
    FileHeader("task=gymnasium:X frame_stack=1 observation_layout=auto", spec).check(Path("segments"), before)
    assert json.loads(before["segments"])["action"] == [[], "int32", 0, spec.action.high], "as without action masks"
