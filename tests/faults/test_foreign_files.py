"""A run uses only regular files: no link leads it out of its directory, and no FIFO blocks it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apex_jax.config import Config
from apex_jax.host.errors import RunError
from apex_jax.replay.experience_log import ExperienceLog
from apex_jax.replay.header import Header, JournalError
from apex_jax.run.checkpoint import Checkpointer
from apex_jax.run.checkpoint_files import CheckpointError
from apex_jax.run.metrics import append_line
from apex_jax.run.provenance import check_resumable, record_start
from apex_jax.run.storage import Storage
from apex_jax.types import ActionSpec, SegmentSpec
from apex_jax.workers.local import run_lock

SPEC = SegmentSpec(
    frame_shape=(5,), frame_dtype="float32", frame_stack=2, slots=16, n_step=3, action=ActionSpec.discrete(3)
)
VALUABLE = b"somebody's thesis\n"
pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file outside the run directory, which no run may change."""
    path = tmp_path / "thesis.tex"
    path.write_bytes(VALUABLE)
    return path


def header(directory: Path) -> Header:
    return Header(directory, Config().compatibility_key, SPEC)


def lock_run(directory: Path) -> None:
    with run_lock(directory):
        pass


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {  # file in the run directory, and who opens it
    "supervisor's lock": ("lock", lock_run),
    "learner's lock": ("checkpoints/.lock", lambda directory: Checkpointer(str(directory), 3).close()),
    "replay's lock": (
        "replay/lock",
        lambda directory: ExperienceLog(directory / "replay", header(directory), 10).close(),
    ),
    "starts": ("starts.jsonl", lambda directory: append_line(directory / "starts.jsonl", b"{}\n")),
    "metrics": ("metrics/a.jsonl", lambda directory: append_line(directory / "metrics" / "a.jsonl", b"{}\n")),
}
every_writer = pytest.mark.parametrize(("name", "write"), WRITERS.values(), ids=WRITERS)


@every_writer
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo"])
def test_foreign_file_is_refused_at_once_and_unchanged(
    tmp_path: Path, target: Path, name: str, write: Callable[[Path], object], kind: str
) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(target if kind == "link" else tmp_path / "missing")
    with pytest.raises((OSError, RunError, CheckpointError, JournalError), match="remove it"):
        write(tmp_path / "run")
    assert target.read_bytes() == VALUABLE
    assert not (tmp_path / "missing").exists()


@every_writer
def test_run_directory_may_itself_be_a_link(tmp_path: Path, name: str, write: Callable[[Path], object]) -> None:
    (tmp_path / "disk" / name).parent.mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    write(tmp_path / "run")
    assert (tmp_path / "disk" / name).is_file()


@pytest.mark.parametrize("check", [record_start, check_resumable])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_config_that_is_no_regular_file_ends_the_start_with_its_path(tmp_path: Path, kind: str, check: Any) -> None:
    path = tmp_path / "config.yaml"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to(tmp_path / "missing")
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    with pytest.raises(OSError, match="regular file") as caught:
        check(Config(run_directory=str(tmp_path)))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", ["dangling link", "fifo"])
def test_checkpoint_that_is_no_folder_is_skipped(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "checkpoints" / "7"
    path.parent.mkdir()
    os.mkfifo(path) if kind == "fifo" else path.symlink_to(tmp_path / "missing")
    checkpointer = Checkpointer(str(tmp_path))
    assert checkpointer.restore_newest({}, "", "") is None
    checkpointer.close()


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
