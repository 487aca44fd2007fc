"""Snapshots restore the very state that was saved, the one before if the newest is damaged, and no other journal."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apex_jax.replay.header import JournalError, check_journal
from tests.rigs.journals import World, config_of, files, flip, wait_for_snapshots, warnings
from tests.rigs.links import CONFIG, SPEC


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
    newest = files(tmp_path, "snapshot")[-1]
    flip(newest, newest.stat().st_size // 2)
    world = World(tmp_path)
    assert (world.numbers(), max(world.leaves()[1]), world.ledger.steps) == ([1, 2], 9.0**0.6, 20)
    assert len(warnings(caplog)) == 1
    world.save()
    sound = files(tmp_path, "snapshot")
    assert [path.name for path in sound] == ["snapshot-000000000001", "snapshot-000000000002"]
    world.kill()
    World(tmp_path).kill()
    assert warnings(caplog) == []


def test_a_snapshot_is_due_after_its_interval(tmp_path: Path) -> None:
    world = World(tmp_path)

    def snapshots_at(now_seconds: float) -> int:
        world.snapshot_if_due(now_seconds)
        wait_for_snapshots()
        return len(files(tmp_path, "snapshot"))

    world.store(1)
    assert snapshots_at(59.0) == 0
    assert snapshots_at(60.0) == 1
    assert snapshots_at(119.0) == 1
    assert snapshots_at(120.0) == 2
    world.kill()


@pytest.mark.parametrize("call", ["os.fsync", "os.replace", "np.savez"])
def test_failed_snapshot_leaves_no_half_file_and_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def fail(*_: object) -> None:
        if call == "np.savez":
            raise MemoryError
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    world = World(tmp_path)
    world.store(1)
    world.save()
    kept = files(tmp_path, "snapshot")
    world.learn(1, 9.0)
    module, _, name = call.partition(".")
    monkeypatch.setattr({"os": os, "np": np}[module], name, fail)
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


def test_fault_11_journal_of_another_configuration_is_refused_and_unchanged(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store(1)
    world.stop()
    before = {path.name: path.read_bytes() for path in (tmp_path / "replay").iterdir()}
    other = config_of(tmp_path).replace(environment=replace(CONFIG.environment, task="Catch-v0"))
    with pytest.raises(
        JournalError, match=r"environment.task: was Pong-v5, now Catch-v0; .*another run_directory, or move .*/replay"
    ):
        World(tmp_path, config=other)
    assert {path.name: path.read_bytes() for path in (tmp_path / "replay").iterdir()} == before


def test_the_run_that_a_server_has_joined_is_in_its_journal(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store(1)
    world.journal.on_run("0123456789abcdef")
    world.snapshot_if_due(0.0)
    wait_for_snapshots()
    world.kill()
    again = World(tmp_path)
    assert again.journal.header.run == "0123456789abcdef"
    again.kill()
    (tmp_path / "run_identity").write_text("fedcba9876543210")
    with pytest.raises(JournalError, match=r"is the replay of run 0123456789abcdef, .* is of run fedcba9876543210"):
        check_journal(config_of(tmp_path), SPEC)
