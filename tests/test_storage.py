"""The copy of a run: whole or not at all, named files only, and nothing trusted on the way back."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from apex_jax import storage as module
from apex_jax.errors import RunError
from apex_jax.storage import SECTIONS, Section, Storage, StorageError, files_of, local_progress

LOG = "replay/segments-00000000000000000000.log"
SNAPSHOT = "replay/snapshot-000000000001"
IDENTITY = "0123456789abcdef"


def write(directory: Path, name: str, data: bytes) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_in(tmp_path)


def run_in(folder: Path) -> Path:
    """Returns a run directory with something of everything."""
    directory = folder / "run"
    for name in ("checkpoints/100/state/d/x", "checkpoints/100/checksums.json", "checkpoints/200/state/d/x"):
        write(directory, name, name.encode())
    write(directory, "checkpoints/200/empty", b"")
    write(directory, "metrics/learner.jsonl", b'{"a": 1}\n')
    write(directory, "config.yaml", b"seed: 1\n")
    write(directory, "run_identity", IDENTITY.encode())
    write(directory, LOG, b"segments")
    write(directory, SNAPSHOT, b"snapshot")
    for name in ("lock", "checkpoints/.lock", "checkpoints/.saving-300/x", "checkpoints/damaged-150-1/x"):
        write(directory, name, b"nobody's")
    write(directory, "replay/snapshot-000000000002.tmp", b"half")
    return directory


def content(directory: Path) -> dict[str, bytes]:
    """Returns every file by its path."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def copied(directory: Path) -> dict[str, bytes]:
    """Returns the files that a copy should hold."""
    return {name: path.read_bytes() for section in SECTIONS for name, path in files_of(section, directory)}


def push(url: Path | str, directory: Path) -> int:
    """Copies all; returns the bytes transferred."""
    storage = Storage(str(url))
    return sum(storage.push(section, directory) or 0 for section in SECTIONS)


def pull(url: Path | str, directory: Path) -> dict[str, bytes]:
    storage = Storage(str(url))
    for section in SECTIONS:
        storage.pull(section, directory)
    return content(directory)


# There and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_what_comes_back_is_what_went_without_locks_and_halves(tmp_path: Path, run: Path, scheme: str) -> None:
    url = f"{scheme}{tmp_path / 'copy'}"
    push(url, run)
    back = pull(url, tmp_path / "back")
    assert back == copied(run)
    assert back.keys() == {
        "checkpoints/100/state/d/x", "checkpoints/100/checksums.json", "checkpoints/200/state/d/x",
        "checkpoints/200/empty", "metrics/learner.jsonl", "config.yaml", "run_identity", LOG, SNAPSHOT,
    }  # fmt: skip
    assert not list((tmp_path / "back").glob(".fetching*"))


def test_keys_unknown_files_and_links_are_never_copied(tmp_path: Path, run: Path) -> None:
    named = copied(run)
    for name in ("keys/actor.secret", "notes.txt", ".env", "metrics/notes.txt", "replay/server.secret", "other/x.log"):
        write(run, name, b"secret")
    write(tmp_path, "outside/learner.secret", b"secret")
    (run / "video.mp4").symlink_to(tmp_path / "outside" / "learner.secret")
    (run / "tensorboard").mkdir()
    (run / "tensorboard" / "learner").symlink_to(tmp_path / "outside")
    push(tmp_path / "copy", run)
    assert pull(tmp_path / "copy", tmp_path / "back") == named
    assert not any(path.read_bytes() == b"secret" for path in (tmp_path / "copy").rglob("*") if path.is_file())


@pytest.mark.parametrize("folder", ["checkpoints", "replay"])
def test_folder_that_is_a_link_is_refused_and_not_left_out_in_silence(tmp_path: Path, run: Path, folder: str) -> None:
    (run / folder).rename(tmp_path / "elsewhere")
    (run / folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=f"{folder} is a link, which no copy follows: link .* instead"):
        push(tmp_path / "copy", run)
    assert not (tmp_path / "copy").exists()


def stored_files(copy: Path) -> set[str]:
    return {path.name for path in (copy / "learner" / "files").iterdir()}


def test_second_copy_transfers_only_what_is_new_and_deletes_what_has_gone_when_it_is_an_hour_old(
    tmp_path: Path, run: Path
) -> None:
    url, storage = tmp_path / "copy", Storage(str(tmp_path / "copy"))
    storage.push("learner", run)
    assert storage.push("learner", run) == 0
    old, hour_ago = stored_files(url), time.time() - module.KEPT_SECONDS
    shutil.rmtree(run / "checkpoints" / "100")
    write(run, "checkpoints/300/state/d/x", b"new")
    assert storage.push("learner", run) == 3
    assert stored_files(url) > old
    for name in old:
        os.utime(url / "learner" / "files" / name, (hour_ago, hour_ago))
    write(run, "checkpoints/300/state/d/y", b"newer")
    assert Storage(str(url)).push("learner", run) == 5, "another process knows what is there"
    assert push(url, run) == len(b"segmentssnapshot")
    assert pull(url, tmp_path / "back") == copied(run)
    assert len(stored_files(url)) == len(files_of("learner", run))


def test_file_that_has_changed_is_stored_under_a_new_name(tmp_path: Path, run: Path) -> None:
    storage = Storage(str(tmp_path / "copy"))
    storage.push("replay", run)
    before = storage.manifest("replay").files
    with open(run / LOG, "ab") as file:
        file.write(b" and more")
    assert storage.push("replay", run) == len(b"segments and more")
    after = storage.manifest("replay").files
    assert after[LOG].name != before[LOG].name
    assert after[SNAPSHOT] == before[SNAPSHOT]
    assert (tmp_path / "copy" / "replay" / "files" / before[LOG].name).read_bytes() == b"segments", "for its readers"
    write(run, LOG, b"a torn end of a log")
    storage.push("replay", run)
    assert pull(tmp_path / "copy", tmp_path / "back")[LOG] == b"a torn end of a log"


def test_files_larger_than_a_block_come_back(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 7)
    push(tmp_path / "copy", run)
    assert pull(tmp_path / "copy", tmp_path / "back") == copied(run)


def test_files_that_the_storage_has_lost_are_uploaded_again(tmp_path: Path, run: Path) -> None:
    storage = Storage(str(tmp_path / "copy"))
    storage.push("learner", run)
    shutil.rmtree(tmp_path / "copy" / "learner" / "files")
    assert (storage.push("learner", run) or 0) > 0
    pull(tmp_path / "copy", tmp_path / "back")
    assert content(tmp_path / "back") == {name: path.read_bytes() for name, path in files_of("learner", run)}


def test_file_that_is_in_place_already_stays(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    write(tmp_path / "back", "config.yaml", b"seed: 2\n")
    (tmp_path / "back" / "replay").mkdir()
    back = pull(tmp_path / "copy", tmp_path / "back")
    assert back["config.yaml"] == b"seed: 2\n"
    assert back[LOG] == b"segments"


# Broken off -------------------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Lets the storage take so many files and manifests, and then no more."""
    written = [0]

    def counted(real: Any) -> Any:
        def write_or_fail(*arguments: Any) -> Any:
            written[0] += 1
            if written[0] > count:
                raise ConnectionResetError(104, "Connection reset by peer")
            return real(*arguments)

        return write_or_fail

    for name in ("_write", "_write_manifest"):
        monkeypatch.setattr(Storage, name, counted(getattr(Storage, name)))


@pytest.mark.parametrize("written", range(6))
def test_copy_that_is_broken_off_leaves_the_one_before_and_the_next_is_whole(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    monkeypatch.setattr(module, "KEPT_SECONDS", 0.0)
    url = tmp_path / "copy"
    push(url, run)
    before = copied(run)
    shutil.rmtree(run / "checkpoints" / "100")
    for name in ("a", "b", "c"):
        write(run, f"checkpoints/300/{name}", name.encode())
    storage = Storage(str(url))
    with monkeypatch.context() as patch:
        failing(patch, written)
        if written < 4:  # three files and the manifest
            with pytest.raises(StorageError, match="Connection reset by peer"):
                storage.push("learner", run)
            assert pull(url, tmp_path / "old") == before
        else:
            storage.push("learner", run)
    storage.push("learner", run)
    assert pull(url, tmp_path / "new") == copied(run)
    assert len(stored_files(url)) == len(files_of("learner", run)), "nothing is left of the one broken off"


def test_checkpoint_that_makes_room_while_it_is_copied_is_left_out(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Storage._copy

    def copy_while_the_learner_saves(storage: Storage, section: Section, path: Path, *rest: Any) -> Any:
        if "checkpoints/100" in str(path) and path.exists():
            shutil.rmtree(run / "checkpoints" / "100")
            write(run, "checkpoints/300/x", b"newest")
        return real(storage, section, path, *rest)

    monkeypatch.setattr(Storage, "_copy", copy_while_the_learner_saves)
    Storage(str(tmp_path / "copy")).push("learner", run)
    back = pull(tmp_path / "copy", tmp_path / "back")
    assert back == {name: data for name, data in copied(run).items() if not name.startswith("replay")}
    assert "checkpoints/300/x" in back


def test_a_disk_without_room_is_told_as_that(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(tmp_path / "copy", run)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.rename", full)
    with pytest.raises(StorageError, match=r"No space left on device; make room, or choose another place$"):
        pull(tmp_path / "copy", tmp_path / "other")


def test_fetch_that_is_cancelled_leaves_no_checkpoint(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    answers = iter([False, False, True])
    assert Storage(str(tmp_path / "copy")).pull("learner", tmp_path / "back", lambda: next(answers)) is None
    assert local_progress("learner", tmp_path / "back") is None
    assert pull(tmp_path / "copy", tmp_path / "back") == copied(run)
