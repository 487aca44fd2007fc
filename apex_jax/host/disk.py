"""Opens only regular files of a run directory, writes, flushes and verifies them, and locks directories."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from apex_jax.host.machine import usable_memory_bytes

_log = logging.getLogger(__name__)

NOT_REGULAR = "is a symbolic link, a FIFO or a device where a run keeps a regular file: remove it"
CHECKSUMS = "checksums.json"  # in each checkpoint: size and CRC of its other files, verified before any is parsed
MAX_CHECKSUMS_BYTES = 2**24
MAX_READ_BYTES = 2**30  # of a file that is read whole
PIECE_BYTES = 2**20  # read from a file at once
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
    """Returns the content of a file of a run directory. Raises OSError, see `open_regular`; also for `most` bytes."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size >= most:  # a sparse one takes no room on the disk, but in memory
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
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a path to write to: its file is flushed and becomes `path` if the context ends without an error, otherwise
    it is deleted. It has the same ending, by which libraries choose the format. Raises OSError.
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
    with atomic_write(path) as half, open(open_regular(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        for part in parts:
            file.write(part.encode() if isinstance(part, str) else part)


def lock(directory: Path, descriptor: int) -> bool:
    """Locks `directory` through a file in it, until the file is closed; returns False if another process holds it.

    On a file system without locks, logs a warning and returns True: a second process could then lock it, too.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.warning("%s cannot be locked (%s): start no second run there", directory, error.strerror)
    return True


def checkpoint_steps(checkpoints: Path) -> list[int]:
    """Returns the number of updates of each checkpoint in a directory, ascending, including damaged checkpoints."""
    try:
        names = [path.name for path in checkpoints.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if name.isdecimal() and name.isascii())


def run_of_checkpoint(path: str | os.PathLike[str]) -> tuple[str, int | None]:
    """Splits `RUN/checkpoints/12000` into RUN and 12000; returns any other path as it is, with None."""
    step = Path(path)
    if step.parent.name == "checkpoints" and step.name.isdecimal() and step.name.isascii():
        return os.fspath(step.parent.parent), int(step.name)
    return os.fspath(path), None


def sound_steps(checkpoints: Path) -> list[int]:
    """Returns `checkpoint_steps` without the damaged checkpoints after the newest sound one."""
    steps = checkpoint_steps(checkpoints)
    while steps and not is_sound(checkpoints / str(steps[-1])):
        steps.pop()
    return steps


def is_sound(step: Path) -> bool:
    """Returns whether the files of a checkpoint are as they were saved."""
    try:
        check_files(step)
    except Exception:  # of any type: the damage may have left any JSON
        return False
    return True


def damaged_path(path: Path) -> Path:
    """Returns a new name for a damaged file or checkpoint, under which no process reads it."""
    return path.with_name(f"damaged-{path.name}-{time.time_ns()}")


def set_damaged_aside(path: Path) -> None:
    """Renames a damaged file or checkpoint, so that another one can take its place. Raises OSError."""
    os.replace(path, damaged_path(path))


def write_checksums(step: Path) -> None:
    """Writes the size and CRC of each file of a checkpoint, and flushes all files to the disk."""
    files = {name: _checksum(step / name) for name in sorted(_names(step))}
    (step / CHECKSUMS).write_text(json.dumps({"files": files}))
    for path in (*step.rglob("*"), step):
        synchronize(path)


def check_files(step: Path) -> None:
    """Raises various exceptions if a file differs from what was saved, before any parser reads it.

    Its files are those that the checksums list, and no others, in folders that are no links.
    """
    files = json.loads(read_regular(step / CHECKSUMS, MAX_CHECKSUMS_BYTES))["files"]
    if others := _names(step) - {CHECKSUMS} ^ files.keys():
        raise ValueError(f"{min(others)} is not one of its files, or is missing")
    sizes = [(step / name).lstat().st_size for name in files]
    if sizes != [checksum[0] for checksum in files.values()] or sum(sizes) > usable_memory_bytes():
        raise ValueError("its files do not have the sizes with which they were saved, or do not fit into the memory")
    for name, checksum in files.items():
        if _checksum(step / name) != checksum:
            raise ValueError(f"{name} is not as it was saved")


def _names(step: Path) -> set[str]:
    """Returns the paths of everything in a checkpoint that is no folder; links to folders are not followed."""
    return {
        Path(folder, name).relative_to(step).as_posix()
        for folder, folders, names in os.walk(step)
        for name in (*names, *(name for name in folders if Path(folder, name).is_symlink()))
    }


def _checksum(path: Path) -> list[int]:
    """Returns the size and CRC of a file, read in pieces as it may be as large as the state. Raises OSError."""
    size = crc = 0
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        while piece := file.read(PIECE_BYTES):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return [size, crc]
