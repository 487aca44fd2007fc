"""The log of the replay: a torn end is cut off, and reading stops at the first damaged record."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from apex_jax.replay import experience_log, journal
from tests.rigs.journals import World, files, flip, wait_for_snapshots, warnings
from tests.rigs.links import TRANSITIONS


def restarted(directory: Path, capacity: int = 9) -> World:
    """Returns a replay that continues from its directory as after a kill."""
    world = World(directory, capacity)
    world.kill()
    return world


def store(directory: Path, *starts: tuple[int, ...]) -> list[Path]:
    """Stores segments, one file for each start of the server; returns the files."""
    for numbers in starts:
        world = World(directory, capacity=9)
        world.store(*numbers)
        world.kill()
    return files(directory, "segments")


@pytest.mark.parametrize("kept", [1, 100, -1], ids=["in its header", "in its body", "by a byte"])
def test_torn_end_of_a_killed_server_is_cut_off_without_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    [path] = store(tmp_path, (1, 2))
    size = path.stat().st_size
    os.truncate(path, size // 2 + kept if kept > 0 else size - 1)
    assert restarted(tmp_path).numbers() == [1]
    assert path.stat().st_size == size // 2
    store(tmp_path, (2,))
    assert restarted(tmp_path).numbers() == [1, 2]
    assert warnings(caplog) == []


def test_file_that_was_made_but_not_written_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store(tmp_path, (1, 2))
    (tmp_path / "replay" / f"segments-{3:020}.log").touch()
    store(tmp_path, (3,), (4,))
    assert restarted(tmp_path).numbers() == [1, 2, 3, 4]
    assert warnings(caplog) == []


@pytest.mark.parametrize("place", [8, experience_log.HEADER_BYTES, "cut"], ids=["header", "body", "cut off"])
def test_fault_10_the_log_is_read_up_to_its_first_damaged_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: int | str
) -> None:
    paths = store(tmp_path, (1, 2, 3), (4, 5), (6,))
    damaged, size = paths[0], paths[0].stat().st_size
    start = size // 3
    if isinstance(place, int):
        flip(damaged, start + place)  # of 2
    else:
        os.truncate(damaged, start + 99)
    before = {path.name: path.read_bytes() for path in paths}
    world = World(tmp_path, capacity=9)
    assert world.numbers() == [1]
    assert world.ledger.totals()["stored"] == TRANSITIONS
    [line] = warnings(caplog)
    assert line.startswith(f"{damaged} is damaged at byte {start} (")
    assert f"its last {len(before[damaged.name]) - start} bytes and 2 later files are left out" in line
    world.store(7, 8)
    world.kill()
    assert restarted(tmp_path).numbers() == [1, 7, 8]
    assert warnings(caplog) == [], "once is enough"
    aside = {path.name: path.read_bytes() for path in (tmp_path / "replay").glob("damaged-*")}
    assert {name.removeprefix("damaged-").rpartition("-")[0]: data for name, data in aside.items()} == before


# Disks that fail ----------------------------------------------------------------------------------------------------


def filled(directory: Path, monkeypatch: pytest.MonkeyPatch, saved_at: tuple[int, ...] = ()) -> World:
    """Returns a replay of four segments that has stored 59 in many files, and written a snapshot after some."""
    monkeypatch.setattr(experience_log, "FILE_BYTES", 1_000)
    world = World(directory, capacity=4)
    for number in range(1, 60):
        world.store(number)
        if number in saved_at:
            world.save()
    return world


def check_complete(directory: Path) -> None:
    """Fails unless a restart has the newest four of 59 segments, and the counts of all."""
    world = restarted(directory, capacity=4)
    assert world.numbers() == [56, 57, 58, 59]
    assert world.ledger.steps == 590
    assert world.ledger.totals()["stored"] == 59 * TRANSITIONS


def test_files_are_deleted_once_both_snapshots_cover_them_and_their_segments_are_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = filled(tmp_path, monkeypatch)
    for segment_files in (range(11, 60), range(11, 60), range(5), range(5)):  # of no, one, and two snapshots
        assert len(files(tmp_path, "segments")) in segment_files
        size = sum(path.stat().st_size for path in files(tmp_path, "segments"))
        assert world.journal.metrics()["replay/journal_bytes"] == size
        world.save()
    assert len(files(tmp_path, "snapshot")) == 2
    world.kill()
    check_complete(tmp_path)


def test_restore_from_the_previous_snapshot_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, monkeypatch, saved_at=(20, 40, 59)).kill()
    files(tmp_path, "snapshot")[-1].unlink()
    check_complete(tmp_path)


def test_on_a_full_disk_files_of_evicted_segments_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world = filled(tmp_path, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        world.save()
        assert len(files(tmp_path, "segments")) > 10, "no snapshot contains their events"
        world.save()
    assert len(files(tmp_path, "segments")) <= 4
    world.save()
    world.kill()
    check_complete(tmp_path)


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


def test_snapshot_never_deletes_the_file_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, capacity=2_000)
    FullDisk(monkeypatch, failures=1)
    world.store(1, now_seconds=10.0)
    writing, sync = threading.Event(), experience_log.sync

    def slow_sync(paths: list[Path]) -> None:
        assert writing.wait(20)
        sync(paths)

    monkeypatch.setattr(journal, "sync", slow_sync)
    world.journal.request_snapshot()
    world.snapshot_if_due(10.5)
    world.store(*range(2, 100), now_seconds=12.0)
    writing.set()
    wait_for_snapshots()
    world.save()
    world.store(*range(100, 300), now_seconds=13.0)
    world.kill()
    assert restarted(tmp_path, capacity=2_000).numbers() == [*range(1, 300)]


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


def test_full_disk_is_counted_logged_once_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = World(tmp_path, capacity=8)
    world.store(1)
    whole = files(tmp_path, "segments")[0].read_bytes()
    disk = FullDisk(monkeypatch, failures=3)
    world.store(2, now_seconds=10.0)
    world.store(3, now_seconds=10.5)
    assert (world.journal.log.errors, disk.failures) == (1, 2), "not before five seconds have passed"
    assert [path.read_bytes()[: len(whole)] for path in files(tmp_path, "segments")] == [whole]
    world.store(4, now_seconds=15.0)
    world.store(5, now_seconds=20.0)
    assert (world.journal.log.errors, disk.failures) == (3, 0)
    world.journal.flush(25.0)
    assert len(warnings(caplog)) == 1
    world.kill()
    assert restarted(tmp_path).numbers() == [1, 2, 3, 4, 5]
    assert warnings(caplog) == []


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
    assert restarted(tmp_path, capacity=4).numbers() == [76, 77, 78, 79]
