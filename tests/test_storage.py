"""The copy of a run: whole or not at all, never more transferred than is new, and nothing trusted on the way back."""

from __future__ import annotations

import errno
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apex_jax import storage as module
from apex_jax.config import Config, StorageConfig
from apex_jax.config_rules import check
from apex_jax.errors import UsageError
from apex_jax.storage import Cancelled, Storage, StorageError, files_of, newest_local_checkpoint

LOG = "replay/segments-00000000000000000000.log"


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
    write(directory, LOG, b"segments")
    write(directory, "replay/snapshot-1.bin", b"snapshot")
    for name in ("lock", "checkpoints/.lock", "checkpoints/.saving-300/x", "checkpoints/damaged-150-1/x"):
        write(directory, name, b"nobody's")
    write(directory, "replay/snapshot-2.tmp", b"half")
    return directory


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 8)
    monkeypatch.setattr(module, "MERGE_BYTES", 4)


def content(directory: Path) -> dict[str, bytes]:
    """Returns every file by its path."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".copy-of-"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def copied(directory: Path) -> dict[str, bytes]:
    """Returns the files that a copy should hold."""
    return {name: path.read_bytes() for section in module.SECTIONS for name, path in files_of(section, directory)}


def push(url: Path | str, directory: Path) -> int:
    """Copies all; returns the bytes transferred."""
    storage = Storage(str(url))
    return sum(storage.push(section, directory).transferred_bytes for section in module.SECTIONS)


def pull(url: Path | str, directory: Path) -> dict[str, bytes]:
    storage = Storage(str(url))
    for section in module.SECTIONS:
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
        "checkpoints/200/empty", "metrics/learner.jsonl", "config.yaml", LOG, "replay/snapshot-1.bin",
    }  # fmt: skip
    assert not list((tmp_path / "back").glob(".fetching*"))


def test_second_copy_transfers_only_what_is_new_and_deletes_what_has_gone(tmp_path: Path, run: Path) -> None:
    url, storage = tmp_path / "copy", Storage(str(tmp_path / "copy"))
    storage.push("learner", run)
    assert storage.push("learner", run).transferred_bytes == 0
    shutil.rmtree(run / "checkpoints" / "100")
    write(run, "checkpoints/300/state/d/x", b"new")
    assert storage.push("learner", run).transferred_bytes == 3
    assert push(url, run) == len(b"segmentssnapshot"), "another process knows what is there"
    back = pull(url, tmp_path / "back")
    assert back == copied(run)
    pieces = {path.name for path in (url / "learner" / "pieces").iterdir()}
    assert len(pieces) == len({data for name, data in back.items() if not name.startswith("replay/") and data})


@pytest.mark.usefixtures("small_pieces")
def test_of_a_file_that_grows_only_the_end_is_copied_again(tmp_path: Path, run: Path) -> None:
    storage = Storage(str(tmp_path / "copy"))
    write(run, LOG, b"1234567812345678abcdefgh")
    storage.push("replay", run)
    with open(run / LOG, "ab") as file:
        file.write(b"ij")
    assert storage.push("replay", run).transferred_bytes == 2
    with open(run / LOG, "ab") as file:
        file.write(b"klmnop")
    assert storage.push("replay", run).transferred_bytes == 8, "the two last, too small to stay on their own"
    pull(tmp_path / "copy", tmp_path / "back")
    assert (tmp_path / "back" / LOG).read_bytes() == (run / LOG).read_bytes()


@pytest.mark.usefixtures("small_pieces")
def test_file_that_was_cut_and_written_on_is_copied_as_it_is(tmp_path: Path, run: Path) -> None:
    storage = Storage(str(tmp_path / "copy"))
    write(run, LOG, b"a torn tail of a log")
    storage.push("replay", run)
    write(run, LOG, b"a torn then went on with other words")
    storage.push("replay", run)
    pull(tmp_path / "copy", tmp_path / "back")
    assert (tmp_path / "back" / LOG).read_bytes() == b"a torn then went on with other words"


def test_file_that_is_in_place_already_stays(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    write(tmp_path / "back", "config.yaml", b"seed: 2\n")
    (tmp_path / "back" / "replay").mkdir()
    back = pull(tmp_path / "copy", tmp_path / "back")
    assert back["config.yaml"] == b"seed: 2\n"
    assert back[LOG] == b"segments"


# Broken off -------------------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Lets the storage take so many objects, and then no more."""
    real, written = Storage._write, [0]

    def write_or_fail(storage: Storage, name: str, data: bytes) -> None:
        written[0] += 1
        if written[0] > count:
            raise ConnectionResetError(104, "Connection reset by peer")
        real(storage, name, data)

    monkeypatch.setattr(Storage, "_write", write_or_fail)


@pytest.mark.parametrize("written", range(6))
def test_copy_that_is_broken_off_leaves_the_one_before_and_the_next_is_whole(
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
        if written < 4:  # three files and the manifest
            with pytest.raises(StorageError, match="Connection reset by peer"):
                storage.push("learner", run)
            assert pull(url, tmp_path / "old") == before
        else:
            storage.push("learner", run)
    storage.push("learner", run)
    assert pull(url, tmp_path / "new") == copied(run)
    assert len(list((url / "learner" / "pieces").iterdir())) == 7 - 1, "nothing is left of the one broken off"


def test_checkpoint_that_makes_room_while_it_is_copied_is_left_out(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Storage._copy

    def copy_while_the_learner_saves(storage: Storage, section: str, path: Path, *rest: Any) -> Any:
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

    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setattr("shutil.copyfileobj", full)
    monkeypatch.setattr(module, "write_durably", full)
    with pytest.raises(StorageError, match=r"No space left on device; make room, or choose another place$"):
        pull(tmp_path / "copy", tmp_path / "other")


def test_fetch_that_is_cancelled_leaves_no_checkpoint(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    answers = iter([False, False, True])
    with pytest.raises(Cancelled):
        Storage(str(tmp_path / "copy")).pull("learner", tmp_path / "back", lambda: next(answers))
    assert newest_local_checkpoint(tmp_path / "back") is None
    assert pull(tmp_path / "copy", tmp_path / "back") == copied(run)


# Nothing is trusted -----------------------------------------------------------------------------------------------


def damaged_piece(copy: Path) -> None:
    for path in (copy / "learner" / "pieces").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")


def missing_pieces(copy: Path) -> None:
    shutil.rmtree(copy / "learner" / "pieces")


def torn_manifest(copy: Path) -> None:
    path = copy / "learner" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-10])


def no_object(copy: Path) -> None:
    (copy / "learner" / "manifest.json").write_text("[" * 100_000)


def manifest_of(files: Any) -> Callable[[Path], None]:
    def forge(copy: Path) -> None:
        text = json.dumps(files)
        record = {"format": 1, "files": text, "crc": zlib.crc32(text.encode())}
        (copy / "learner" / "manifest.json").write_text(json.dumps(record))

    return forge


@pytest.mark.parametrize("damage", [
    damaged_piece, missing_pieces, torn_manifest, no_object,
    manifest_of({"../../evil": []}), manifest_of({"/evil": []}), manifest_of({"a/../../evil": []}),
    manifest_of({".bashrc": []}), manifest_of({"replay/x": []}), manifest_of({"a": [["../../x", 4]]}),
    manifest_of({"a": [["0" * 64, 2**60]]}), manifest_of({"a": [["0" * 64, -1]]}), manifest_of({"a": [[1, 2, 3]]}),
    manifest_of({"a": [["0" * 64, 2**24]] * 300_000}), manifest_of([1]), manifest_of({"": []}),
])  # fmt: skip
def test_copy_that_is_damaged_or_forged_is_one_line_and_writes_nothing_in_place(
    tmp_path: Path, run: Path, damage: Callable[[Path], None]
) -> None:
    push(tmp_path / "copy", run)
    damage(tmp_path / "copy")
    with pytest.raises(StorageError) as caught:
        Storage(str(tmp_path / "copy")).pull("learner", tmp_path / "back")
    assert str(caught.value).isprintable()
    assert newest_local_checkpoint(tmp_path / "back") is None
    assert not [path for path in tmp_path.rglob("*evil*")]


def test_copy_of_a_run_that_is_further_is_never_overwritten(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    shutil.rmtree(run / "checkpoints" / "200")
    before = content(tmp_path / "copy")
    with pytest.raises(StorageError, match=r"holds a checkpoint at 200 updates, .* one at 150: choose another URL"):
        push(tmp_path / "copy", run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(StorageError, match=r"holds a checkpoint at 200 updates, .* none: choose another URL"):
        push(tmp_path / "copy", run)
    assert content(tmp_path / "copy") == before


def test_copy_of_another_run_is_never_overwritten_however_far_that_is(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    other = tmp_path / "other"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns(".copy-of-*"))
    (other / "checkpoints" / "200").rename(other / "checkpoints" / "1000")
    before = content(tmp_path / "copy")
    for section in module.SECTIONS:
        with pytest.raises(StorageError, match=rf"holds the {section} of another run than .*: choose another URL"):
            Storage(str(tmp_path / "copy")).push(section, other)
    assert content(tmp_path / "copy") == before
    assert pull(tmp_path / "copy", tmp_path / "back").keys() == copied(run).keys()
    push(tmp_path / "copy", tmp_path / "back")  # another machine, the same run


def test_copy_of_before_copies_had_names_is_taken_over_and_named(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    for section in module.SECTIONS:
        path = tmp_path / "copy" / section / "manifest.json"
        record = json.loads(path.read_text())
        del record["identity"]
        path.write_text(json.dumps(record))
        (run / f".copy-of-{section}").unlink()
    assert pull(tmp_path / "copy", tmp_path / "back").keys() == copied(run).keys()
    write(run, "metrics/learner.jsonl", b"more")
    write(run, "replay/more", b"more")
    push(tmp_path / "copy", run)
    for section in module.SECTIONS:
        named = json.loads((tmp_path / "copy" / section / "manifest.json").read_text())["identity"]
        assert named == (run / f".copy-of-{section}").read_text()


@pytest.mark.parametrize("data", [b"no name", b"\xff" * 40, b"A" * 32])
def test_name_of_a_copy_that_is_damaged_is_one_line_and_spoils_no_copy(tmp_path: Path, run: Path, data: bytes) -> None:
    write(run, ".copy-of-learner", data)
    with pytest.raises(StorageError, match=r"\.copy-of-learner is damaged: write into it the identity"):
        push(tmp_path / "copy", run)
    write(run, ".copy-of-learner", b"")
    push(tmp_path / "copy", run)
    assert pull(tmp_path / "copy", tmp_path / "back").keys() == copied(run).keys()


def test_copy_of_a_replay_that_is_further_is_never_overwritten(tmp_path: Path, run: Path) -> None:
    older = run / "replay" / f"segments-{1:020}-000001.log"
    newer = run / "replay" / f"segments-{99:020}-000002.log"
    older.write_bytes(b"old")
    newer.write_bytes(b"new")
    push(tmp_path / "copy", run)
    newer.unlink()
    with pytest.raises(StorageError, match=r"holds a replay up to event 99, .* one at 1: choose another URL"):
        Storage(str(tmp_path / "copy")).push("replay", run)


def test_lock_of_a_replay_that_never_was_is_in_nobodys_way_and_stays_locked(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    write(tmp_path / "back", "replay/lock", b"")
    lock = (tmp_path / "back" / "replay" / "lock").stat().st_ino
    assert pull(tmp_path / "copy", tmp_path / "back")[LOG] == b"segments"
    assert (tmp_path / "back" / "replay" / "lock").stat().st_ino == lock


def test_replay_that_is_not_there_yet_does_not_empty_the_copy(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    shutil.rmtree(run / "replay")
    assert Storage(str(tmp_path / "copy")).push("replay", run) == (0, 0)
    assert pull(tmp_path / "copy", tmp_path / "back")[LOG] == b"segments"


def test_copy_within_the_run_itself_is_refused(run: Path) -> None:
    with pytest.raises(StorageError, match="which it would copy"):
        push(run / "copy", run)


@pytest.mark.parametrize("url", ["s4://x/y", "gs://bucket/x", "nonsense://x"])
def test_url_that_no_installed_package_serves_is_one_line(url: str) -> None:
    with pytest.raises(StorageError, match=rf"{url}: .*; check the URL") as caught:
        Storage(url)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("url", ["s3://", "s3:///", "://x", "simplecache::s3://b/x", "C:x", ".", "/"])
def test_url_that_cannot_be_one_is_wrong_usage(url: str) -> None:
    with pytest.raises(UsageError, match=r"storage\.url=.*: must be SCHEME://PLACE"):
        check(Config(storage=StorageConfig(url=url)))
