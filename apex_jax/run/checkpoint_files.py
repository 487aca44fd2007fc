"""The files of checkpoints: `<run directory>/checkpoints/<updates>/`, each with the checksums of its files."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

from apex_jax.host.disk import open_regular, read_regular, synchronize
from apex_jax.host.errors import RunError

CHECKSUMS = "checksums.json"  # in each checkpoint: size and CRC of its other files, verified before any is parsed
MAX_CHECKSUMS_BYTES = 2**24
BLOCK_BYTES = 2**20  # read from a file at once
FIX_OF_DIFFERENCE = "use the configuration it was made with, or another run_directory"


class CheckpointError(RunError):
    """A checkpoint cannot be restored or saved; the message names it and the reason."""


def checkpoint_steps(checkpoints: Path) -> list[int]:
    """Returns the number of updates of each checkpoint in a directory, ascending, including damaged checkpoints."""
    try:
        names = [path.name for path in checkpoints.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if name.isdecimal() and name.isascii())


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


def write_checksums(step: Path) -> None:
    """Writes the size and CRC of each file of a checkpoint, and flushes all files to the disk."""
    names = sorted(path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file())
    (step / CHECKSUMS).write_text(json.dumps({"files": {name: _checksum(step / name) for name in names}}))
    for path in (*step.rglob("*"), step):
        synchronize(path)


def check_files(step: Path) -> None:
    """Raises various exceptions if a file differs from what was saved, or is missing."""
    files = json.loads(read_regular(step / CHECKSUMS, MAX_CHECKSUMS_BYTES))["files"]
    for name, (size, crc) in files.items():
        if (step / name).lstat().st_size != size or _checksum(step / name) != [size, crc]:
            raise ValueError(f"{name} is not as it was saved")


def _checksum(path: Path) -> list[int]:
    """Returns the size and CRC of a file, read in blocks because it may be as large as the state. Raises OSError."""
    size = crc = 0
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        while block := file.read(BLOCK_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]
