"""Runs to copy, and the expected content of their copies."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apex_jax.run.checkpoint_files import CHECKSUMS, write_checksums
from apex_jax.run.identity import FILE_NAME
from apex_jax.run.storage import SECTIONS, Storage, files_of, progress_of

LOG = "replay/segments-00000000000000000001.log"
HEAD = "replay/journal.json"
SNAPSHOT = "replay/snapshot-000000000001"

IDENTITY = "0123456789abcdef"


def write(directory: Path, name: str, data: bytes) -> None:
    """Writes a file; the checkpoint that it belongs to, if any, is sound."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if checkpoint := re.match("checkpoints/[0-9]+/", name):
        (directory / checkpoint[0] / CHECKSUMS).unlink(missing_ok=True)
        write_checksums(directory / checkpoint[0])


def run_in(folder: Path) -> Path:
    """Returns a run directory with something of everything."""
    directory = folder / "run"
    for name in ("checkpoints/100/state/d/x", "checkpoints/200/state/d/x"):
        write(directory, name, name.encode())
    write(directory, "checkpoints/200/empty", b"")
    write(directory, "metrics/learner.jsonl", b'{"a": 1}\n')
    write(directory, "config.yaml", b"seed: 1\n")
    write(directory, "run_identity", IDENTITY.encode())
    write(directory, HEAD, b"head")
    write(directory, LOG, b"segments")
    write(directory, SNAPSHOT, b"snapshot")
    damaged = ("checkpoints/damaged-150-1/x", f"replay/damaged-{Path(LOG).name}-1")
    for name in ("lock", "checkpoints/.lock", "checkpoints/.saving-300/x", *damaged):
        write(directory, name, b"nobody's")
    write(directory, "replay/.snapshot-000000000002.half", b"half")
    return directory


def content(directory: Path) -> dict[str, bytes]:
    """Returns every file by its path."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def copied(directory: Path) -> dict[str, bytes]:
    """Returns the files that a copy should hold."""
    paths = dict(named for section in SECTIONS for named in files_of(section, directory))
    return {name: path.read_bytes() for name, path in {**paths, FILE_NAME: directory / FILE_NAME}.items()}


def push(url: Path | str, directory: Path) -> int:
    """Copies all; returns the bytes transferred."""
    storage = Storage(str(url))
    return sum(storage.push(section, directory) or 0 for section in SECTIONS)


def pull(url: Path | str, directory: Path) -> dict[str, bytes]:
    storage = Storage(str(url))
    for section in SECTIONS:
        storage.pull(section, directory)
    return content(directory)


def failing(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Makes the storage fail after this many files."""
    real, calls = Storage._write, itertools.count()

    def write_or_fail(*arguments: Any) -> None:
        if next(calls) >= count:
            raise ConnectionResetError(104, "Connection reset by peer")
        real(*arguments)

    monkeypatch.setattr(Storage, "_write", write_or_fail)


def newest_checkpoint(storage: Storage) -> int | None:
    """Returns the updates behind the newest checkpoint of the copy."""
    return progress_of("learner", storage.copy("learner").files)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket on this machine."""
    moto_server = pytest.importorskip("moto.server")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "nobody"),
        ("AWS_SECRET_ACCESS_KEY", "nothing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    import fsspec

    bucket = f"bucket-{secrets.token_hex(8)}"  # moto's servers of one process share their buckets
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # those of the server of the test before
    fsspec.filesystem("s3", skip_instance_cache=True).mkdirs(bucket)
    yield f"s3://{bucket}/runs/one"
    server.stop()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with something of everything."""
    return run_in(tmp_path)
