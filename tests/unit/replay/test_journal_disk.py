"""The journal on the disk: what it takes, what it gives back, and what becomes of it where the disk fails."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from apex_jax.replay import experience_log, journal
from tests.rigs.journals import World, files, warnings
from tests.rigs.links import TRANSITIONS


def test_files_are_deleted_once_both_snapshots_cover_them_and_their_segments_are_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experience_log, "FILE_BYTES", 1_000)
    world = World(tmp_path, capacity=4)
    for number in range(1, 60):
        world.store(number)
    assert len(files(tmp_path, "segments")) > 10, "no snapshot contains their events"
    world.save()
    assert len(files(tmp_path, "segments")) > 10, "only one snapshot contains their events"
    size = sum(path.stat().st_size for path in files(tmp_path, "segments"))
    assert world.journal.metrics()["replay/journal_bytes"] == size
    world.save()
    assert len(files(tmp_path, "segments")) <= 4
    size = sum(path.stat().st_size for path in files(tmp_path, "segments"))
    assert world.journal.metrics()["replay/journal_bytes"] == size
    world.save()
    assert len(files(tmp_path, "snapshot")) == 2
    world.kill()
    world = World(tmp_path, capacity=4)
    assert world.numbers() == [56, 57, 58, 59]
    assert world.counters.ledger.steps == 590
    world.kill()


def test_restore_from_the_previous_snapshot_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experience_log, "FILE_BYTES", 1_000)
    world = World(tmp_path, capacity=4)
    for number in range(1, 60):
        world.store(number)
        if number in (20, 40):
            world.save()
    world.save()
    world.kill()
    files(tmp_path, "snapshot")[-1].unlink()
    world = World(tmp_path, capacity=4)
    assert world.numbers() == [56, 57, 58, 59]
    assert world.counters.ledger.steps == 590
    assert world.counters.ledger.totals(())["stored"] == 59 * TRANSITIONS
    world.kill()


def test_snapshot_syncs_the_files_of_a_killed_server_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill loses nothing that the kernel has, a loss of power soon after it does."""
    world = World(tmp_path)
    world.store(1, 2)
    world.kill()
    log = files(tmp_path, "segments")[0].stat().st_ino
    world = World(tmp_path)
    synced: list[int] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    world.save()
    snapshot = files(tmp_path, "snapshot")[0].stat().st_ino
    assert synced.index(log) < synced.index(snapshot)
    world.kill()


def test_on_a_full_disk_files_of_evicted_segments_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(experience_log, "FILE_BYTES", 1_000)
    world = World(tmp_path, capacity=4)
    for number in range(1, 60):
        world.store(number)
    monkeypatch.setattr(os, "fsync", fail)
    world.save()
    assert len(files(tmp_path, "segments")) > 10, "no snapshot contains their events"
    world.save()
    assert len(files(tmp_path, "segments")) <= 4
    monkeypatch.undo()
    world.save()
    world.kill()
    world = World(tmp_path, capacity=4)
    assert world.numbers() == [56, 57, 58, 59]
    assert world.counters.ledger.steps == 590
    world.kill()


def test_snapshot_never_deletes_the_file_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, capacity=2_000)
    FullDisk(monkeypatch, failures=1)
    world.store(1, now_seconds=10.0)
    writing, sync = threading.Event(), experience_log.sync

    def slow_sync(paths: list[Path]) -> None:
        assert writing.wait(20)
        sync(paths)

    monkeypatch.setattr(journal, "sync", slow_sync)
    world.journal.snapshot(world.buffer, world.limiter, world.counters, 10.5)
    world.store(*range(2, 100), now_seconds=12.0)
    writing.set()
    assert world.journal._thread is not None
    world.journal._thread.join()
    world.journal._take_result()
    world.save()
    world.store(*range(100, 300), now_seconds=13.0)
    world.kill()
    world = World(tmp_path, capacity=2_000)
    assert world.numbers() == [*range(1, 300)]
    world.kill()


class FullDisk:
    """A disk that takes half of what is written, `failures` times, and then all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
        self.failures = failures
        self._writev = os.writev
        monkeypatch.setattr(os, "writev", self)

    def __call__(self, descriptor: int, buffers: list[bytes]) -> int:
        if self.failures:
            self.failures -= 1
            data = b"".join(buffers)
            return os.write(descriptor, data[: len(data) // 2])
        return self._writev(descriptor, buffers)


def test_full_disk_is_counted_logged_once_retried_and_leaves_no_half_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = World(tmp_path, capacity=8)
    world.store(1)
    whole = files(tmp_path, "segments")[0].stat().st_size
    disk = FullDisk(monkeypatch, failures=3)
    world.store(2, now_seconds=10.0)
    world.store(3, now_seconds=10.5)
    assert (world.journal.errors, disk.failures) == (1, 2), "not before five seconds have passed"
    assert [path.stat().st_size for path in files(tmp_path, "segments")] == [whole]
    world.store(4, now_seconds=15.0)
    world.store(5, now_seconds=20.0)
    assert (world.journal.errors, disk.failures) == (3, 0)
    world.journal.flush(25.0)
    assert len(warnings(caplog)) == 1
    world.kill()
    world = World(tmp_path, capacity=8)
    assert world.numbers() == [1, 2, 3, 4, 5]
    assert warnings(caplog) == []
    world.kill()


def test_pending_records_are_limited_by_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experience_log, "SPARE_EVENTS", 0)
    world = World(tmp_path, capacity=4)
    disk = FullDisk(monkeypatch, failures=100)
    for number in range(1, 40):
        world.store(number, now_seconds=1e3 * number)
    assert len(world.journal.log.pending) <= 5
    for number in range(40, 80):
        world.store(number, now_seconds=39_000.5)  # between two attempts
    assert len(world.journal.log.pending) <= 5
    disk.failures = 0
    world.journal.flush(np.inf)
    world.kill()
    world = World(tmp_path, capacity=4)
    assert world.numbers() == [76, 77, 78, 79]
    world.kill()
