"""What the disk must keep when the power fails, and what only one process may write."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)

NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)  # as file systems have it that cannot


def synchronize(path: Path) -> None:
    """Has the disk keep a file, or the names in a directory, before this returns. OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Writes a small file whole or not at all, and has the disk keep it. OSError."""
    half = path.with_name(f"{path.name}.half")
    half.write_text(text)
    synchronize(half)
    os.replace(half, path)
    synchronize(path.parent)


def lock(directory: Path, descriptor: int) -> bool:
    """Takes `directory` by an open file in it, for as long as that is open; returns False where another process has it.

    A file system without locks is warned of: nothing there keeps a second process away.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.warning("%s cannot be locked (%s): start no second run there", directory, error.strerror)
    return True


def checkpoint_steps(checkpoints: Path) -> list[int]:
    """Returns the updates behind each checkpoint in a directory of them, ascending, the damaged ones included."""
    try:
        names = [path.name for path in checkpoints.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if name.isdecimal() and name.isascii())
