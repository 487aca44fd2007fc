"""Specification of locks and fsync, also on file systems that have neither."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from apex_jax.host import disk


def test_a_directory_is_for_one_process_until_its_file_is_closed(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as first, open(tmp_path / "lock", "w") as second:
        assert disk.lock(tmp_path, first.fileno())
        assert not disk.lock(tmp_path, second.fileno())
        first.close()
        assert disk.lock(tmp_path, second.fileno())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL])
def test_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with open(tmp_path / "lock", "w") as file:
        assert disk.lock(tmp_path, file.fileno())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{tmp_path} cannot be locked ({os.strerror(number)})" in caplog.text


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_files_and_directories_are_synchronized_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "file" if kind == "file" else tmp_path
    (tmp_path / "file").write_bytes(b"x")
    synchronized: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synchronized.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    before = len(os.listdir("/proc/self/fd"))
    disk.synchronize(path)
    assert synchronized == [str(path.resolve())]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("number", "is_told"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_missing_sync_support_is_no_error_but_a_disk_error_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_told: bool
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    if is_told:
        with pytest.raises(OSError, match=os.strerror(number)):
            disk.synchronize(tmp_path)
    else:
        disk.synchronize(tmp_path)


@pytest.mark.parametrize("checksums", [None, b"", b"[1]", b"{}", b'{"files": 1}', b'{"files": {"x": [1, 2]}}'])
def test_newest_damaged_checkpoints_are_not_sound(tmp_path: Path, checksums: bytes | None) -> None:
    for updates in (100, 200, 300):
        (tmp_path / str(updates)).mkdir()
        (tmp_path / str(updates) / "x").write_bytes(b"x")
        disk.write_checksums(tmp_path / str(updates))
    assert disk.sound_steps(tmp_path) == [100, 200, 300]
    for updates in (100, 300):
        path = tmp_path / str(updates) / disk.CHECKSUMS
        path.unlink() if checksums is None else path.write_bytes(checksums)
    assert disk.sound_steps(tmp_path) == [100, 200], "only up to the newest sound one are they read"


@pytest.mark.parametrize(("path", "run", "updates"), [
    ("runs/a/checkpoints/12000", "runs/a", 12000), ("runs/a/checkpoints/12000/", "runs/a", 12000),
    ("checkpoints/7", ".", 7), ("runs/a", "runs/a", None), ("runs/a/checkpoints", "runs/a/checkpoints", None),
    ("runs/7", "runs/7", None), ("runs/a/checkpoints/.lock", "runs/a/checkpoints/.lock", None), ("", "", None),
])  # fmt: skip
def test_path_of_a_checkpoint_names_its_run_and_updates(path: str, run: str, updates: int | None) -> None:
    assert disk.run_of_checkpoint(path) == (run, updates)
