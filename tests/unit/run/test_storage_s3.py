"""A copy on S3, for which a server on this machine stands in, is complete; a missing bucket is an error."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from apex_jax.run import storage as module
from apex_jax.run.storage import Storage, StorageError
from tests.rigs.storages import copied, newest_checkpoint, pull, push, run, s3, write

__all__ = ["run", "s3"]


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


def test_file_of_several_parts_reaches_s3_and_comes_back(
    tmp_path: Path, run: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 5 * 2**20)  # S3 takes no smaller part
    write(run, "checkpoints/300/x", os.urandom(11 * 2**20))
    push(s3, run)
    assert pull(s3, tmp_path / "back") == copied(run)


def test_bucket_that_does_not_exist_is_an_error_and_no_empty_copy(s3: str) -> None:
    with pytest.raises(StorageError, match="no-such-bucket"):
        newest_checkpoint(Storage("s3://no-such-bucket-at-all/x"))
