"""Two processes that copy to one URL at once: a copy that can be restored, and never of a run that is behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apex_jax.run.storage import Storage, StorageError
from tests.rigs.storages import IDENTITY, copied, pull, run_in, s3, write

__all__ = ["s3"]


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.long)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for a copy."""
    return str(tmp_path / "copy") if request.param == "folder" else str(request.getfixturevalue("s3"))


def before_the_first_manifest(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    """Has `act` happen when a push has uploaded its files, and has not yet named them."""
    real, acts = Storage.write_manifest, [act]

    def write_manifest(storage: Storage, *arguments: Any) -> None:
        if acts:
            acts.pop()()
        real(storage, *arguments)

    monkeypatch.setattr(Storage, "write_manifest", write_manifest)


def test_one_of_two_concurrent_pushes_of_two_runs_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = run_in(tmp_path / "first"), run_in(tmp_path / "second")
    write(second, "run_identity", IDENTITY[::-1].encode())
    before_the_first_manifest(monkeypatch, lambda: Storage(url).push("learner", second))
    with pytest.raises(StorageError, match="holds the learner of another run"):
        Storage(url).push("learner", first)
    back = pull(url, tmp_path / "back")
    assert back == {name: data for name, data in copied(second).items() if not name.startswith("replay")}


def test_replaced_machine_that_is_still_alive_does_not_overwrite_a_copy_that_is_ahead(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path)
    replaced = Storage(url)
    replaced.push("learner", run)
    pull(url, tmp_path / "replacement")

    def replacement_saves() -> None:
        write(tmp_path / "replacement", "checkpoints/400/x", b"ahead")
        Storage(url).push("learner", tmp_path / "replacement")

    before_the_first_manifest(monkeypatch, replacement_saves)  # when the replaced machine has looked, and is not behind
    for checkpoint in ("checkpoints/300/x", "checkpoints/310/x"):
        write(run, checkpoint, b"behind")
        with pytest.raises(StorageError, match="holds a checkpoint at 400 updates"):
            replaced.push("learner", run)
    back = pull(url, tmp_path / "back")
    assert back["checkpoints/400/x"] == b"ahead"
    assert "checkpoints/300/x" not in back


@pytest.mark.timeout(300)
def test_push_does_not_delete_new_files_of_another_push(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = run_in(tmp_path), Storage.write_manifest
    other_has_uploaded, has_deleted = threading.Event(), threading.Event()

    def push_beside() -> None:
        write(run, "checkpoints/300/x", b"three")
        Storage(url).push("learner", run)

    other = threading.Thread(target=push_beside)

    def write_manifest(storage: Storage, *arguments: Any) -> None:
        if threading.current_thread() is other:
            other_has_uploaded.set()
            has_deleted.wait(20)
            real(storage, *arguments)
        else:
            real(storage, *arguments)
            other.start()
            other_has_uploaded.wait(20)

    monkeypatch.setattr(Storage, "write_manifest", write_manifest)
    Storage(url).push("learner", run)
    has_deleted.set()
    other.join()
    assert pull(url, tmp_path / "back")["checkpoints/300/x"] == b"three"
