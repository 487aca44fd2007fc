"""Files of a run: opened only if they are the run's own, kept when the power fails, locked against a second process."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from pathlib import Path

_log = logging.getLogger(__name__)

NOT_REGULAR = "is a symbolic link, a FIFO or a device where a run keeps a regular file: remove it"
NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)  # as file systems have it that cannot


def open_regular(path: Path, flags: int) -> int:
    """Opens a file of a run directory and returns its descriptor. OSError for anything but a regular file.

    A symbolic link could lead out of the directory to a file that is not the run's, and a FIFO would wait for its other
    end. Links among the folders above are followed: a run directory may be on another disk.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO or a socket, to be written to
            raise
        raise OSError(error.errno, NOT_REGULAR, str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def read_regular(path: Path) -> bytes:
    """Returns the content of a file of a run directory. OSError, see `open_regular`."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()


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
    half.unlink(missing_ok=True)  # of a process that was killed
    with open(open_regular(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
        file.write(text)
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
