"""Copies a run's results (metrics, TensorBoard files, pictures) between hosts and the folder results/ in the bucket.

    python -m deploy.host.results fetch   to a host without results of its own, before the role starts
    python -m deploy.host.results copy    to the bucket, every ten minutes and after the role has ended

All hosts write to one folder, which thus looks like a run directory; their file names contain the names of processes,
and therefore differ. Checkpoints and the replay are copied by learner and replay server themselves (`storage.url`).
"""

from __future__ import annotations

import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deploy.host.aws import client

BY_EVERY_ROLE = ("metrics/{role}.jsonl", "tensorboard/{role}/*")
BY_ROLE = {"learner": ("config.yaml", "starts.jsonl"), "evaluator": ("video.*",), "replay": ()}  # actors have none


def main() -> int:
    """Returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    actions = {"fetch": fetch, "copy": copy}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        print("usage: python -m deploy.host.results fetch | copy", file=sys.stderr)
        return 2
    url, run, role = (os.environ.get(f"APEX_JAX_{name}", "") for name in ("STORAGE", "RUN", "ROLE"))
    if not url or not run or role not in BY_ROLE:
        return 0
    if sys.argv[1] == "fetch" and role == "learner":
        return 0  # its copy of the run contains them, in the state of its newest checkpoint
    try:
        actions[sys.argv[1]](url, Path(run), role)
    except Exception as error:  # a network or AWS error: systemd runs this again
        print(f"error: {url}: {error}", file=sys.stderr)
        return 1
    return 0


def copy(url: str, run: Path, role: str) -> None:
    """Uploads the role's files that the bucket lacks or has in another size."""
    store, bucket, prefix = _place(url)
    stored = _stored(store, bucket, prefix)
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if is_of_role(name, role) and path.is_file() and stored.get(name) != path.stat().st_size:
            with open(path, "rb") as file:
                store.put_object(Bucket=bucket, Key=prefix + name, Body=file)


def fetch(url: str, run: Path, role: str) -> None:
    """Downloads the role's files to a host that has none, so that the role appends to them instead of starting anew."""
    if any(is_of_role(path.relative_to(run).as_posix(), role) for path in run.rglob("*")):
        return
    store, bucket, prefix = _place(url)
    for name in _stored(store, bucket, prefix):
        if is_of_role(name, role):
            _bring(store, bucket, prefix + name, run / name)


def _bring(store: Any, bucket: str, key: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with open(part, "wb") as file:
        for data in store.get_object(Bucket=bucket, Key=key)["Body"].iter_chunks(2**20):
            file.write(data)
    part.replace(path)  # atomic: the next copy would upload half a file


def is_of_role(name: str, role: str) -> bool:
    """Returns whether a file, named by its path in the run directory, is a result of this role."""
    if ".." in name.split("/") or name.startswith("/"):
        return False
    patterns = (*(pattern.format(role=role) for pattern in BY_EVERY_ROLE), *BY_ROLE.get(role, ()))
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def _place(url: str) -> tuple[Any, str, str]:
    """Returns a client, the bucket, and the common prefix of the keys of all results."""
    parts = urlsplit(url)
    return client("s3"), parts.netloc, f"{parts.path.strip('/')}/results/"


def _stored(store: Any, bucket: str, prefix: str) -> dict[str, int]:
    """Returns the size of each stored file by its path in the run directory."""
    pages = store.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return {one["Key"].removeprefix(prefix): one["Size"] for page in pages for one in page.get("Contents", [])}


if __name__ == "__main__":
    sys.exit(main())
