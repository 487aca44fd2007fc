"""How a start reads the files of a run directory: it follows no link, blocks on no FIFO, and logs changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.config import Config
from apex_jax.host.errors import RunError
from apex_jax.run.checkpoint import Checkpointer, CheckpointError, Progress
from apex_jax.run.checkpoint_files import CHECKSUMS
from apex_jax.run.provenance import check_resumable, record_start
from apex_jax.run.storage import Storage


@pytest.mark.parametrize("check", [record_start, check_resumable])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_config_that_is_no_regular_file_ends_the_start_with_its_path(tmp_path: Path, kind: str, check: Any) -> None:
    path = tmp_path / "config.yaml"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to(tmp_path / "missing")
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    with pytest.raises(OSError, match="regular file") as caught:
        check(Config(run_directory=str(tmp_path)))
    assert str(path) in str(caught.value)


def test_fifo_in_place_of_checksums_does_not_block_a_restore(tmp_path: Path) -> None:
    state, progress = {"weight": np.ones(3, np.float32)}, Progress(1, 4, 1.0, 2, "compatibility_key", "architecture")
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(state, progress)
    checkpointer.wait()
    (checkpointer.directory / "1" / CHECKSUMS).unlink()
    os.mkfifo(checkpointer.directory / "1" / CHECKSUMS)
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* can be read"):
        checkpointer.restore_newest(state, "compatibility_key", "architecture")
    checkpointer.close()


@pytest.mark.parametrize("kind", ["dangling link", "fifo"])
def test_checkpoint_that_is_no_folder_is_skipped_with_one_warning(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "checkpoints" / "7"
    path.parent.mkdir()
    os.mkfifo(path) if kind == "fifo" else path.symlink_to(tmp_path / "missing")
    checkpointer = Checkpointer(str(tmp_path))
    assert checkpointer.restore_newest({}, "", "") is None
    checkpointer.close()
    assert sum("checkpoints/7 is left out" in record.message for record in caplog.records) == 1


def test_fifo_in_place_of_the_identity_of_a_run_fails_the_push(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "replay").mkdir(parents=True)
    (run / "replay" / "snapshot-000000000001").write_bytes(b"1")
    os.mkfifo(run / "run_identity")
    with pytest.raises(RunError, match=r"run_identity cannot be read \(.*FIFO.*\); move it away"):
        Storage(str(tmp_path / "copy")).push("replay", run)


def test_fetching_follows_no_link_out_of_the_run_directory(tmp_path: Path) -> None:
    source, run, outside = tmp_path / "source", tmp_path / "run", tmp_path / "outside"
    for folder in (source / "replay", run, outside):
        folder.mkdir(parents=True)
    (source / "replay" / "snapshot-000000000001").write_bytes(b"1")
    Storage(str(tmp_path / "copy")).push("replay", source)
    (run / ".fetching-replay").symlink_to(outside)
    Storage(str(tmp_path / "copy")).pull("replay", run)
    assert list(outside.rglob("*")) == []
    assert (run / "replay" / "snapshot-000000000001").read_bytes() == b"1"
