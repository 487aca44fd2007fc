"""The copy of a run: never newer than what it relies on, only files of a run, nothing overwritten."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from apex_jax.host.disk import open_regular
from apex_jax.host.errors import RunError
from apex_jax.run import storage as module
from apex_jax.run.storage import Storage, StorageError, local_progress
from tests.rigs.journals import World
from tests.rigs.storages import (
    HEAD,
    IDENTITY,
    LOG,
    SNAPSHOT,
    content,
    copied,
    failing,
    newest_checkpoint,
    pull,
    push,
    run,
    s3,
    write,
)

__all__ = ["run", "s3"]


def age(directory: Path) -> None:
    """Makes all files an hour old."""
    for path in directory.rglob("*"):
        os.utime(path, (time.time() - 3600,) * 2)


# There and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_restored_copy_equals_the_run_without_locks_and_half_files(tmp_path: Path, run: Path, scheme: str) -> None:
    url = f"{scheme}{tmp_path / 'copy'}"
    push(url, run)
    back = pull(url, tmp_path / "back")
    assert back == copied(run)
    assert back.keys() == {
        "checkpoints/100/state/d/x", "checkpoints/100/checksums.json", "checkpoints/200/state/d/x",
        "checkpoints/200/checksums.json", "checkpoints/200/empty", "metrics/learner.jsonl",
        "config.yaml", "run_identity", HEAD, LOG, SNAPSHOT,
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
def test_linked_folder_is_refused_with_an_error(tmp_path: Path, run: Path, folder: str) -> None:
    (run / folder).rename(tmp_path / "elsewhere")
    (run / folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=f"{folder} is a link, which no copy follows: link .* instead"):
        push(tmp_path / "copy", run)
    assert not (tmp_path / "copy").exists()


def test_next_copy_transfers_changed_files_only_and_deletes_old_ones(tmp_path: Path, run: Path) -> None:
    age(run)
    assert push(tmp_path / "copy", run) == sum(map(len, copied(run).values())) - len(IDENTITY)
    assert push(tmp_path / "copy", run) == 0, "another process knows what is there"
    shutil.rmtree(run / "checkpoints" / "100")
    write(run, "logs/learner.log", b"new")
    with open(run / LOG, "ab") as file:
        file.write(b" and more")
    write(run, "config.yaml", b"seed: 2\n")  # of the same size
    assert push(tmp_path / "copy", run) == len(b"new" + b"segments and more" + b"seed: 2\n")
    assert pull(tmp_path / "copy", tmp_path / "back") == copied(run)
    assert (
        content(tmp_path / "copy" / "learner").keys() | content(tmp_path / "copy" / "replay").keys()
        == copied(run).keys()
    )
    write(run, LOG, b"a torn end of a log")
    push(tmp_path / "copy", run)
    assert pull(tmp_path / "copy", tmp_path / "again")[LOG] == b"a torn end of a log"


# Broken off -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", range(6))
def test_interrupted_copy_has_a_whole_checkpoint_and_the_next_is_complete(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    age(run)
    url = tmp_path / "copy"
    push(url, run)
    shutil.rmtree(run / "checkpoints" / "100")
    for name in ("a", "b", "c"):
        write(run, f"checkpoints/300/{name}", name.encode())
    storage = Storage(str(url))
    with monkeypatch.context() as patch:
        failing(patch, written)
        if written < 4:
            with pytest.raises(StorageError, match="Connection reset by peer"):
                storage.push("learner", run)
        else:
            storage.push("learner", run)
    newest = 200 if written < 4 else 300
    assert newest_checkpoint(storage) == newest
    pull(url, tmp_path / "old")
    assert local_progress("learner", tmp_path / "old") == newest
    storage.push("learner", run)
    assert pull(url, tmp_path / "new") == copied(run)
    assert content(url / "learner") == {name: data for name, data in copied(run).items() if "replay" not in name}


def test_interrupted_copy_of_a_replay_has_no_snapshot_without_its_log(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(str(tmp_path / "copy"))
    names = ["run_identity", HEAD, LOG, SNAPSHOT]
    for written in range(len(names) + 1):
        with monkeypatch.context() as patch, contextlib.suppress(StorageError):
            failing(patch, written)
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            storage.push("replay", run)
        assert content(tmp_path / "copy" / "replay").keys() == set(names[:written])


def test_replay_that_was_fetched_is_restored_and_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.store(1, 2)
    world.save()
    world.store(3)
    push(tmp_path / "copy", tmp_path / "run")
    world.kill()
    pull(tmp_path / "copy", tmp_path / "back")
    back = World(tmp_path / "back")
    assert back.numbers() == [1, 2, 3]
    back.store(4)
    back.kill()
    push(tmp_path / "copy", tmp_path / "back")
    pull(tmp_path / "copy", tmp_path / "again")
    again = World(tmp_path / "again")
    assert again.numbers() == [1, 2, 3, 4]
    again.kill()


@pytest.mark.parametrize("deleted", [100, 200])
def test_checkpoint_deleted_during_the_copy_is_skipped_unless_it_was_the_newest(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, deleted: int
) -> None:
    def open_while_the_learner_saves(path: Path, flags: int) -> int:
        if f"checkpoints/{deleted}" in str(path) and path.exists():
            shutil.rmtree(run / "checkpoints" / str(deleted))
            write(run, "checkpoints/300/x", b"newest")
        return open_regular(path, flags)

    monkeypatch.setattr(module, "open_regular", open_while_the_learner_saves)
    storage = Storage(str(tmp_path / "copy"))
    if deleted == 100:
        storage.push("learner", run)
        assert newest_checkpoint(storage) == 200
    else:
        with pytest.raises(StorageError, match="changes faster than it can be copied"):
            storage.push("learner", run)
    push(tmp_path / "copy", run)
    assert pull(tmp_path / "copy", tmp_path / "back") == copied(run)


def test_fetch_of_a_file_that_a_run_deletes_meanwhile_is_an_error_and_installs_nothing(
    tmp_path: Path, run: Path
) -> None:
    push(tmp_path / "copy", run)

    def copy_again() -> bool:  # called before each block that is fetched
        shutil.rmtree(run / "checkpoints" / "100", ignore_errors=True)
        Storage(str(tmp_path / "copy")).push("learner", run)
        return False

    with pytest.raises(StorageError, match="No such file"):
        Storage(str(tmp_path / "copy")).pull("learner", tmp_path / "back", copy_again)
    assert local_progress("learner", tmp_path / "back") is None
    assert pull(tmp_path / "copy", tmp_path / "back") == copied(run)


def test_fetch_that_is_cancelled_leaves_no_checkpoint(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    answers = iter([False, False, True])
    assert Storage(str(tmp_path / "copy")).pull("learner", tmp_path / "back", lambda: next(answers)) is None
    assert local_progress("learner", tmp_path / "back") is None
    assert pull(tmp_path / "copy", tmp_path / "back") == copied(run)


@pytest.mark.ci
def test_copies_on_s3_are_pushed_and_pulled_like_those_in_a_folder(tmp_path: Path, run: Path, s3: str) -> None:
    age(run)  # S3 knows times to the second
    assert push(s3, run) > 0
    assert push(s3, run) == 0
    assert pull(s3, tmp_path / "back") == copied(run)
    shutil.rmtree(run / "checkpoints" / "100")
    write(run, "checkpoints/300/x", b"new")
    write(run, "metrics/learner.jsonl", b"longer than before")
    push(s3, run)
    assert pull(s3, tmp_path / "again") == copied(run)
    assert newest_checkpoint(Storage(s3)) == 300
    assert newest_checkpoint(Storage(f"{s3}/empty")) is None


@pytest.mark.long
def test_file_of_several_parts_reaches_s3_and_comes_back(
    tmp_path: Path, run: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 5 * 2**20)  # S3 takes no smaller part
    write(run, "checkpoints/300/x", os.urandom(11 * 2**20))
    push(s3, run)
    assert pull(s3, tmp_path / "back") == copied(run)


def test_s3_without_the_extra_storage_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(StorageError, match=r"s3://bucket/x: needs `pip install -r requirements-storage\.txt`"):
        Storage("s3://bucket/x")


@pytest.mark.long
def test_bucket_that_does_not_exist_is_an_error_and_no_empty_copy(s3: str) -> None:
    with pytest.raises(StorageError, match="no-such-bucket"):
        newest_checkpoint(Storage("s3://no-such-bucket-at-all/x"))


# Nothing is trusted -----------------------------------------------------------------------------------------------


def listed(names: Iterable[str]) -> Any:
    """Returns the answer of a storage that lists these names, which only S3 permits."""
    return lambda self, root, **_: {
        f"{root}/learner/{name}": {"name": name, "size": 1, "mtime": 0.0} for name in ["config.yaml", *names]
    }


@pytest.mark.parametrize(
    "name", ["../../evil", "/evil", "checkpoints/1/../../../evil", ".bashrc", LOG, "keys/x", "", "lock"]
)
def test_file_that_no_run_has_is_not_fetched(
    tmp_path: Path, run: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(tmp_path / "copy", run)
    storage = Storage(str(tmp_path / "copy"))
    monkeypatch.setattr(type(storage._files), "find", listed([name]))
    assert storage.pull("learner", tmp_path / "back") == 1
    assert content(tmp_path / "back") == {"config.yaml": b"s"}


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"?", lambda data: data[:-1]])
def test_damaged_checkpoint_of_a_copy_is_passed_over(
    tmp_path: Path, run: Path, change: Callable[[bytes], bytes]
) -> None:
    push(tmp_path / "copy", run)
    damaged = tmp_path / "copy/learner/checkpoints/200/state/d/x"
    damaged.write_bytes(change(damaged.read_bytes()))
    pull(tmp_path / "copy", tmp_path / "back")
    assert local_progress("learner", tmp_path / "back") == 100


def test_copy_that_is_ahead_is_never_overwritten(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    shutil.rmtree(run / "checkpoints" / "200")
    before = content(tmp_path / "copy")
    with pytest.raises(StorageError, match=r"holds a checkpoint at 200 updates, .* one at 100: choose another URL"):
        push(tmp_path / "copy", run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(StorageError, match=r"holds a checkpoint at 200 updates, .* none: choose another URL"):
        push(tmp_path / "copy", run)
    assert content(tmp_path / "copy") == before


def test_damaged_checkpoint_does_not_replace_its_sound_copy(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    before = content(tmp_path / "copy")
    (run / "checkpoints" / "200" / "state" / "d" / "x").write_bytes(b"torn")
    with pytest.raises(StorageError, match=r"holds a checkpoint at 200 updates, .* one at 100: choose another URL"):
        push(tmp_path / "copy", run)
    assert content(tmp_path / "copy") == before
    push(tmp_path / "new", run)
    assert not any("checkpoints/200" in name for name in pull(tmp_path / "new", tmp_path / "back"))


def test_copy_of_another_run_is_never_overwritten(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "run_identity").write_text(IDENTITY[::-1])
    (other / "checkpoints" / "200").rename(other / "checkpoints" / "1000")
    before = content(tmp_path / "copy")
    for section in ("learner", "replay"):
        with pytest.raises(StorageError, match=rf"holds the {section} of another run than .*: choose another URL"):
            Storage(str(tmp_path / "copy")).push(section, other)
    assert content(tmp_path / "copy") == before
    assert pull(tmp_path / "copy", tmp_path / "back").keys() == copied(run).keys()
    push(tmp_path / "copy", tmp_path / "back")  # another machine, the same run


def test_copy_of_another_run_is_not_fetched_into_a_run_that_has_begun(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    write(tmp_path / "back", "run_identity", IDENTITY[::-1].encode())
    with pytest.raises(RunError, match=f"the copy on .* is of run {IDENTITY}, this process of run {IDENTITY[::-1]}"):
        pull(tmp_path / "copy", tmp_path / "back")
    assert local_progress("learner", tmp_path / "back") is None


def test_copy_of_a_replay_that_is_ahead_is_never_overwritten(tmp_path: Path, run: Path) -> None:
    newer = run / "replay" / f"segments-{99:020}.log"
    newer.write_bytes(b"new")
    push(tmp_path / "copy", run)
    aside = newer.rename(newer.with_name(f"damaged-{newer.name}-1"))
    push(tmp_path / "copy", run)  # the run that has set damage aside goes on, and so does its copy
    newer.write_bytes(b"new")
    push(tmp_path / "copy", run)
    newer.unlink()
    aside.unlink()
    with pytest.raises(StorageError, match=r"holds a replay up to event 99, .* one at 1: choose another URL"):
        Storage(str(tmp_path / "copy")).push("replay", run)


def test_missing_replay_does_not_empty_the_copy(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    shutil.rmtree(run / "replay")
    assert Storage(str(tmp_path / "copy")).push("replay", run) is None
    assert pull(tmp_path / "copy", tmp_path / "back")[LOG] == b"segments"
