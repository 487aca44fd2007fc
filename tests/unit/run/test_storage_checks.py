"""What a copy of a run is checked for before anything is overwritten or put in its place."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apex_jax.host.errors import RunError
from apex_jax.run import storage as module
from apex_jax.run.storage import Storage, StorageError, local_progress
from tests.rigs.storages import IDENTITY, LOG, content, copied, pull, push, run, write

__all__ = ["run"]

NAME, SHA256 = "0" * 32, "0" * 64


# Nothing is trusted -----------------------------------------------------------------------------------------------


def damaged_file(copy: Path) -> None:
    for path in (copy / "learner" / "files").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")


def shorter_file(copy: Path) -> None:
    for path in (copy / "learner" / "files").iterdir():
        path.write_bytes(path.read_bytes()[:-1])


def missing_files(copy: Path) -> None:
    shutil.rmtree(copy / "learner" / "files")


def torn_manifest(copy: Path) -> None:
    path = copy / "learner" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-10])


def no_object(copy: Path) -> None:
    (copy / "learner" / "manifest.json").write_text("[" * 100_000)


def manifest_of(files: Any, identity: Any = IDENTITY, unnamed: Any = {}) -> Callable[[Path], None]:  # noqa: B006
    def forge(copy: Path) -> None:
        text = json.dumps(files)
        record = {"format": module.FORMAT, "identity": identity, "files": text, "crc": zlib.crc32(text.encode())}
        (copy / "learner" / "manifest.json").write_text(json.dumps(record | {"unnamed": unnamed}))

    return forge


EVIL = ("../../evil", "/evil", "checkpoints/1/../../../evil", "checkpoints/1/\0", ".bashrc", LOG, "keys/x", "")


@pytest.mark.parametrize("damage", [
    damaged_file, shorter_file, missing_files, torn_manifest, no_object,
    *(manifest_of({path: [NAME, 0, SHA256]}) for path in EVIL),
    manifest_of({"config.yaml": ["../../x", 4, SHA256]}), manifest_of({"config.yaml": [NAME, 2**60, SHA256]}),
    manifest_of({"config.yaml": [NAME, -1, SHA256]}), manifest_of({"config.yaml": [NAME, 0.5, SHA256]}),
    manifest_of({"config.yaml": [NAME, 1, "0"]}), manifest_of({"config.yaml": [1, 2, 3]}),
    manifest_of({"config.yaml": [NAME, 1]}), manifest_of([1]), manifest_of({}, "no name"), manifest_of({}, [1]),
    manifest_of({}, unnamed=[1]), manifest_of({}, unnamed={NAME: 0.5}),
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
    before = json.dumps({"format": 1, "identity": "", "files": "{}", "crc": 0})
    write(tmp_path, "copy/learner/manifest.json", before.encode())
    for use in (lambda: push(tmp_path / "copy", run), lambda: pull(tmp_path / "copy", tmp_path / "back")):
        with pytest.raises(StorageError, match="has format 1, this release reads 2; use the release that wrote it, or"):
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


def test_copy_of_a_run_without_an_identity_is_taken_over_when_it_has_one(tmp_path: Path, run: Path) -> None:
    (run / "run_identity").unlink()
    push(tmp_path / "copy", run)
    assert pull(tmp_path / "copy", tmp_path / "back").keys() == copied(run).keys()
    write(run, "run_identity", IDENTITY.encode())
    push(tmp_path / "copy", run)
    assert {Storage(str(tmp_path / "copy")).manifest(section).identity for section in ("learner", "replay")} == {
        IDENTITY
    }
    (run / "run_identity").unlink()
    with pytest.raises(StorageError, match="holds the learner of another run"):
        push(tmp_path / "copy", run)


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


def test_lock_of_an_empty_replay_stays_locked_and_does_not_block_a_fetch(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    write(tmp_path / "back", "replay/lock", b"")
    lock = (tmp_path / "back" / "replay" / "lock").stat().st_ino
    assert pull(tmp_path / "copy", tmp_path / "back")[LOG] == b"segments"
    assert (tmp_path / "back" / "replay" / "lock").stat().st_ino == lock


def test_missing_replay_does_not_empty_the_copy(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    shutil.rmtree(run / "replay")
    assert Storage(str(tmp_path / "copy")).push("replay", run) is None
    assert pull(tmp_path / "copy", tmp_path / "back")[LOG] == b"segments"


@pytest.mark.parametrize("url", ["s4://x/y", "gs://bucket/x", "nonsense://x", "memory://x"])
def test_url_that_is_neither_s3_nor_a_folder_is_a_one_line_error(url: str) -> None:
    with pytest.raises(StorageError, match=rf"{url}: .*; check the URL") as caught:
        Storage(url)
    assert str(caught.value).isprintable()
