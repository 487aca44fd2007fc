"""Snapshots: whole or not at all, the one before if the newest is damaged."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from apex_jax.replay import journal, snapshots
from tests.rigs.journals import RUN, World, files, first_leaves, flip, warnings


def test_damaged_snapshot_is_logged_and_the_previous_one_is_used(
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
    assert (world.numbers(), max(world.leaves()[1]), world.counters.environment_steps) == ([1, 2], 9.0**0.6, 20)
    assert len(warnings(caplog)) == 1
    world.save()
    sound = files(tmp_path, "snapshot")
    assert [path.name for path in sound] == ["snapshot-000000000001", "snapshot-000000000003"]
    world.kill()
    World(tmp_path).kill()
    assert warnings(caplog) == []


def test_without_a_snapshot_segments_get_their_initial_priorities(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    world.store(1, 2)
    world.learn(1, 9.0)
    world.save()
    world.kill()
    files(tmp_path, "snapshot")[-1].write_bytes(b"")
    world = World(tmp_path)
    assert world.leaves() == {number: first_leaves(number) for number in (1, 2)}
    assert world.counters.ledger.account(RUN).sequence == 2
    assert len(warnings(caplog)) == 1
    world.kill()


def test_a_snapshot_is_due_after_its_interval_and_when_the_log_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)

    def snapshots_at(now_seconds: float) -> int:
        world.journal.snapshot_if_due(world.buffer, world.limiter, lambda: world.counters, now_seconds)
        if world.journal._thread is not None:
            world.journal._thread.join()
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


@pytest.mark.parametrize("call", ["os.write", "os.fsync", "os.replace", "snapshots.synchronize", "snapshots.crc32"])
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
    monkeypatch.setattr({"os": os, "snapshots": snapshots}[module], name, fail)
    for _ in range(3):
        world.save()
    assert world.journal.errors == 3
    assert files(tmp_path, "snapshot") == kept
    assert len(warnings(caplog)) == 1
    monkeypatch.undo()
    world.stop()
    world = World(tmp_path)
    assert max(world.leaves()[1]) == 9.0**0.6
    world.kill()
