"""Files of a run directory: atomic writes, fsync and locks, also on file systems that have neither."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

import pytest

from apex_jax.host import disk
from apex_jax.host.errors import RunError

REFUSAL = RunError("it is in use")


def test_a_directory_is_for_one_process_until_its_file_is_closed(tmp_path: Path) -> None:
    first = disk.lock_file(tmp_path / "lock", REFUSAL)
    with pytest.raises(RunError, match="in use"):
        disk.lock_file(tmp_path / "lock", REFUSAL)
    os.close(first)
    os.close(disk.lock_file(tmp_path / "lock", REFUSAL))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL])
def test_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    os.close(disk.lock_file(tmp_path / "lock", REFUSAL))
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


def test_file_too_large_to_be_read_is_refused_before_it_is(tmp_path: Path) -> None:
    os.truncate(os.open(tmp_path / "sparse", os.O_CREAT | os.O_WRONLY), 2**40)
    with pytest.raises(OSError, match="sparse"):
        disk.read_regular(tmp_path / "sparse")


def test_reader_sees_the_old_file_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    path.write_text("before")
    with disk.atomic_write(path) as half:
        half.write_text("ne")
        assert path.read_text() == "before"
        assert half.suffix == ".png", "writers choose their format by the ending"
        half.write_text("new")
    assert path.read_text() == "new"
    with contextlib.suppress(RuntimeError), disk.atomic_write(path) as half:
        half.write_text("half")
        raise RuntimeError("broken")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_half_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    path, outside = tmp_path / "run" / "curves.png", tmp_path / "outside"
    path.parent.mkdir()
    outside.write_text("mine")
    path.symlink_to(outside)
    path.with_name(".curves.half.png").symlink_to(outside)
    with disk.atomic_write(path) as half:
        half.write_text("new")
    assert outside.read_text() == "mine"
    assert (path.read_text(), path.is_symlink()) == ("new", False)


@pytest.mark.parametrize(("path", "run", "updates"), [
    ("runs/a/checkpoints/12000", "runs/a", 12000), ("runs/a/checkpoints/12000/", "runs/a", 12000),
    ("checkpoints/7", ".", 7), ("runs/a", "runs/a", None), ("runs/a/checkpoints", "runs/a/checkpoints", None),
    ("runs/7", "runs/7", None), ("runs/a/checkpoints/.lock", "runs/a/checkpoints/.lock", None), ("", "", None),
])  # fmt: skip
def test_path_of_a_checkpoint_names_its_run_and_updates(path: str, run: str, updates: int | None) -> None:
    assert disk.run_of_checkpoint(path) == (run, updates)
