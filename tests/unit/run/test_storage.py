"""The copy of a run: whole or not at all, named files only, nothing trusted on the way back, nothing overwritten."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apex_jax.host.disk import open_regular
from apex_jax.host.errors import RunError
from apex_jax.run import storage as module
from apex_jax.run.storage import Storage, StorageError, files_of, local_progress
from tests.rigs.storages import (
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
        "config.yaml", "run_identity", LOG, SNAPSHOT,
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


def stored_files(copy: Path) -> set[str]:
    return {path.name for path in (copy / "learner" / "files").iterdir()}


def test_second_copy_transfers_new_files_and_the_next_deletes_old_ones(tmp_path: Path, run: Path) -> None:
    url, storage = tmp_path / "copy", Storage(str(tmp_path / "copy"))
    storage.push("learner", run)
    assert storage.push("learner", run) == 0
    old = stored_files(url)
    shutil.rmtree(run / "checkpoints" / "100")
    write(run, "logs/learner.log", b"new")
    assert storage.push("learner", run) == 3
    assert stored_files(url) > old, "for readers of the manifest before"
    write(run, "logs/actor.log", b"newer")
    assert Storage(str(url)).push("learner", run) == 5, "another process knows what is there"
    assert push(url, run) == len(b"segmentssnapshot")
    assert pull(url, tmp_path / "back") == copied(run)
    assert len(stored_files(url)) == len(files_of("learner", run))


def test_files_in_a_folder_are_on_the_disk_before_the_manifest_that_names_them(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    synchronized: set[Path] = set()

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name == ".manifest.half.json":
            files = path.with_name("files")
            assert {files, *files.iterdir()} <= synchronized
        synchronized.add(path)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    Storage(str(tmp_path / "copy")).push("learner", run)
    assert tmp_path / "copy" / "learner" / ".manifest.half.json" in synchronized


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


# Broken off -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", range(5))
def test_interrupted_copy_leaves_the_previous_one_and_the_next_is_complete(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    url = tmp_path / "copy"
    push(url, run)
    before = copied(run)
    shutil.rmtree(run / "checkpoints" / "100")
    for name in ("a", "b", "c"):
        write(run, f"checkpoints/300/{name}", name.encode())
    storage = Storage(str(url))
    with monkeypatch.context() as patch:
        failing(patch, written)
        if written < 4:  # files, before the manifest
            with pytest.raises(StorageError, match="Connection reset by peer"):
                storage.push("learner", run)
            assert pull(url, tmp_path / "old") == before
        else:
            storage.push("learner", run)
    storage.push("learner", run)
    assert pull(url, tmp_path / "new") == copied(run)
    write(run, "logs/actor.log", b"newer")
    storage.push("learner", run)
    assert len(stored_files(url)) == len(files_of("learner", run)), "nothing is left of the one broken off"


def test_checkpoint_deleted_during_the_copy_is_skipped(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_while_the_learner_saves(path: Path, flags: int) -> int:
        if "checkpoints/100" in str(path) and path.exists():
            shutil.rmtree(run / "checkpoints" / "100")
            write(run, "checkpoints/300/x", b"newest")
        return open_regular(path, flags)

    monkeypatch.setattr(module, "open_regular", open_while_the_learner_saves)
    Storage(str(tmp_path / "copy")).push("learner", run)
    back = pull(tmp_path / "copy", tmp_path / "back")
    assert back == {name: data for name, data in copied(run).items() if not name.startswith("replay")}
    assert "checkpoints/300/x" in back


def test_fetch_during_a_newer_copy_returns_the_older_one_whole(tmp_path: Path, run: Path) -> None:
    Storage(str(tmp_path / "copy")).push("learner", run)
    before = {name: data for name, data in copied(run).items() if not name.startswith("replay")}

    def copy_again() -> bool:  # called before each block that is fetched
        for name in before:
            write(run, name, IDENTITY.encode())
        Storage(str(tmp_path / "copy")).push("learner", run)
        return False

    Storage(str(tmp_path / "copy")).pull("learner", tmp_path / "back", copy_again)
    assert content(tmp_path / "back") == before


def test_fetch_that_is_cancelled_leaves_no_checkpoint(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    answers = iter([False, False, True])
    assert Storage(str(tmp_path / "copy")).pull("learner", tmp_path / "back", lambda: next(answers)) is None
    assert local_progress("learner", tmp_path / "back") is None
    assert pull(tmp_path / "copy", tmp_path / "back") == copied(run)


@pytest.mark.ci
def test_copies_on_s3_are_pushed_and_pulled_like_those_in_a_folder(tmp_path: Path, run: Path, s3: str) -> None:
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


@pytest.mark.long
def test_bucket_that_does_not_exist_is_an_error_and_no_empty_copy(s3: str) -> None:
    with pytest.raises(StorageError, match="no-such-bucket"):
        newest_checkpoint(Storage("s3://no-such-bucket-at-all/x"))


NAME, SHA256 = "0" * 32, "0" * 64


# Nothing is trusted -----------------------------------------------------------------------------------------------


def changed(files: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(copy: Path) -> None:
        for path in (copy / "learner").glob(files):
            path.write_bytes(change(path.read_bytes()))

    return damage


def manifest_of(files: Any, identity: Any = IDENTITY) -> Callable[[Path], None]:
    def forge(copy: Path) -> None:
        record = {"format": module.FORMAT, "identity": identity, "files": files}
        (copy / "learner" / "manifest.json").write_text(json.dumps(record))

    return forge


EVIL = ("../../evil", "/evil", "checkpoints/1/../../../evil", "checkpoints/1/\0", ".bashrc", LOG, "keys/x", "")


@pytest.mark.parametrize("damage", [
    changed("files/*", lambda data: data[:-1] + b"?"), changed("files/*", lambda data: data[:-1]),
    changed("manifest.json", lambda data: data[:-10]), changed("manifest.json", lambda _: b"[" * 100_000),
    lambda copy: shutil.rmtree(copy / "learner" / "files"),
    *(manifest_of({path: [NAME, 0, SHA256]}) for path in EVIL),
    manifest_of({"config.yaml": ["../../x", 4, SHA256]}), manifest_of({"config.yaml": [NAME, 2**60, SHA256]}),
    manifest_of({"config.yaml": [NAME, -1, SHA256]}), manifest_of({"config.yaml": [NAME, 0.5, SHA256]}),
    manifest_of({"config.yaml": [NAME, 1, "0"]}), manifest_of({"config.yaml": [1, 2, 3]}),
    manifest_of({"config.yaml": [NAME, 1]}), manifest_of([1]), manifest_of({}, "no name"), manifest_of({}, [1]),
])  # fmt: skip
def test_damaged_or_forged_copy_is_a_one_line_error_and_installs_nothing(
    tmp_path: Path, run: Path, damage: Callable[[Path], None]
) -> None:
    push(tmp_path / "copy", run)
    damage(tmp_path / "copy")
    with pytest.raises(StorageError) as caught:
        Storage(str(tmp_path / "copy")).pull("learner", tmp_path / "back")
    assert str(caught.value).isprintable()
    assert local_progress("learner", tmp_path / "back") is None
    assert not [path for path in tmp_path.rglob("*evil*")]


def test_copy_in_the_format_of_an_earlier_release_is_refused_with_what_to_do(tmp_path: Path, run: Path) -> None:
    before = json.dumps({"format": 1, "identity": "", "files": {}})
    write(tmp_path, "copy/learner/manifest.json", before.encode())
    for use in (lambda: push(tmp_path / "copy", run), lambda: pull(tmp_path / "copy", tmp_path / "back")):
        with pytest.raises(StorageError, match="has format 1, this release reads 3; use the release that wrote it, or"):
            use()
    assert content(tmp_path / "copy") == {"learner/manifest.json": before.encode()}


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
    newer = run / "replay" / f"segments-{99:020}-000002.log"
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
