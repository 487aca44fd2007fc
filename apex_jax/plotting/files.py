"""Writes files atomically, because another process may read them meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a path to write to; it becomes `path` if the context ends without an error, otherwise it is deleted."""
    half = path.with_name(f".{path.stem}.half{path.suffix}")
    try:
        yield half
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
