"""Regular files of a run directory: opened, written atomically and flushed to the disk; and locks on directories."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

NOT_REGULAR = "is a symbolic link, a FIFO or a device where a run keeps a regular file: remove it"
MAX_READ_BYTES = 2**30  # of a file that is read whole
NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)  # errors of file systems without fsync


def open_regular(path: Path, flags: int) -> int:
    """Opens a file of a run directory and returns its descriptor. Raises OSError if it is no regular file.

    A symbolic link could lead to a file outside the directory, and opening a FIFO could block until its other end is
    open. Links among the parent folders are followed, since a run directory may be on another disk.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # ELOOP: a link; ENXIO: a FIFO or socket
            raise
        raise OSError(error.errno, NOT_REGULAR, str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def read_regular(path: Path, most: int = MAX_READ_BYTES) -> bytes:
    """Returns the content of a file of a run directory. Raises OSError, see `open_regular`; also at `most` bytes."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size >= most:  # a sparse file takes room in memory, not on the disk
            raise OSError(errno.EFBIG, f"has {most:,} bytes or more, which no run writes", str(path))
        return file.read()


def synchronize(path: Path) -> None:
    """Flushes a file, or the names in a directory, to the disk if the file system can. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to an OSError that has none, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a path to write to: its file is flushed and becomes `path` if the context ends without an error, otherwise
    it is deleted. Both paths have the same ending, from which libraries derive the format. Raises OSError.
    """
    half = path.with_name(f".{path.stem}.half{path.suffix}")
    half.unlink(missing_ok=True)  # left by a killed process, or a link, which a library would follow
    try:
        yield half
        synchronize(half)
        os.replace(half, path)
    except (FileExistsError, FileNotFoundError):  # another process writes the same file, and `half` is its own
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            half.unlink()
        raise
    synchronize(path.parent)


def write_durably(path: Path, *parts: str | bytes | memoryview) -> None:
    """Writes the parts as one file, atomically, see `atomic_write`. Raises OSError."""
    with (
        naming(path),
        atomic_write(path) as half,
        open(open_regular(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file,
    ):
        for part in parts:
            file.write(part.encode() if isinstance(part, str) else part)


def lock_file(path: Path, refusal: Exception) -> int:
    """Creates a file and its folder, and locks it until the returned descriptor is closed.

    Raises `refusal` if another process holds the lock. On a file system without locks, logs a warning: a second process
    could then lock it, too. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError:  # a read-only disk can still be locked and read
        descriptor = open_regular(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise refusal from None
    except OSError as error:
        _log.warning("%s cannot be locked (%s): start no second run there", path.parent, error.strerror)
    return descriptor


def run_of_checkpoint(path: str | os.PathLike[str]) -> tuple[str, int | None]:
    """Splits `RUN/checkpoints/12000` into RUN and 12000; returns any other path as it is, with None."""
    step = Path(path)
    if step.parent.name == "checkpoints" and step.name.isdecimal() and step.name.isascii():
        return os.fspath(step.parent.parent), int(step.name)
    return os.fspath(path), None


def damaged_path(path: Path) -> Path:
    """Returns a new name for a damaged file or checkpoint, under which no process reads it."""
    return path.with_name(f"damaged-{path.name}-{time.time_ns()}")


def set_damaged_aside(path: Path) -> None:
    """Renames a damaged file or checkpoint, so that another one can take its place. Raises OSError."""
    os.replace(path, damaged_path(path))
