"""Files that are looked at while they are made anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Gives a path to write to; the file becomes `path` when the context ends without an error, and else is none."""
    half = path.with_name(f".{path.stem}.half{path.suffix}")
    try:
        yield half
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
