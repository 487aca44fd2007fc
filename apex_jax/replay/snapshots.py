"""Snapshots: facts and arrays in one file, written atomically; the newest sound one is read.

    head: the caller's facts, the name, dtype and shape of each array, and the CRC-32 of all arrays
    the arrays, concatenated, little-endian

A file is named after its number; the newest two are kept.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from apex_jax.host.disk import open_regular, read_regular, synchronize
from apex_jax.replay.file_heads import CorruptFile, Identity, pack, unpack

_log = logging.getLogger(__name__)

MAGIC = b"APEXSNAP"
KEPT = 2
DTYPES = ("<f8", "<i8")
_NAME = re.compile(r"snapshot-([0-9]{12})")


class Snapshot(NamedTuple):
    """The content of a file whose checksums are right."""

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Snapshots:
    """The snapshots of a directory; no other process writes to it."""

    def __init__(self, directory: Path, identity: Identity) -> None:
        self._directory = directory
        self._identity = identity
        self._damaged: set[int] = set()

    def write(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a snapshot, which survives a loss of power when this returns; deletes old ones. Raises OSError."""
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        assert all(array.dtype.newbyteorder("<").str in DTYPES for array in arrays.values())
        crc = 0
        for array in arrays.values():
            crc = crc32(_raw(array), crc)
        layout = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        head = pack(MAGIC, {**self._identity.facts, "facts": dict(facts), "arrays": layout, "crc": crc})
        numbers = self._numbers()
        path = self._path(max(numbers, default=0) + 1)
        temporary = path.with_suffix(".tmp")
        try:
            temporary.unlink(missing_ok=True)  # left by a killed process
            with open(open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb", buffering=0) as file:
                for data in (head, *map(_raw, arrays.values())):
                    _write_whole(file.fileno(), data)
                os.fsync(file.fileno())
            os.replace(temporary, path)
            synchronize(self._directory)
        except BaseException:
            for half in (temporary, path):
                with contextlib.suppress(OSError):
                    half.unlink()
            raise
        sound = [number for number in numbers if number not in self._damaged]
        for number in set(numbers) - set(sound[-(KEPT - 1) :]):
            with contextlib.suppress(OSError):
                self._path(number).unlink()

    def read_newest(self) -> Snapshot | None:
        """Returns the newest readable snapshot, or None if there is none; deletes the files of interrupted writes.

        A damaged snapshot is logged and skipped; a sound one of another configuration raises JournalError.
        """
        for path in self._directory.glob("snapshot-*.tmp"):
            with contextlib.suppress(OSError):
                path.unlink()
        for number in reversed(self._numbers()):
            try:
                return self._read(self._path(number))
            except (CorruptFile, OSError) as error:
                self._damaged.add(number)
                _log.warning("snapshot %s is damaged, trying the one before: %s", self._path(number), error)
        return None

    def _read(self, path: Path) -> Snapshot:
        data = memoryview(read_regular(path, sys.maxsize))
        head, offset = unpack(path, data, MAGIC)
        self._identity.check(path, head)
        if crc32(data[offset:]) != head["crc"]:
            raise CorruptFile("the checksum of its arrays is wrong")
        arrays: dict[str, np.ndarray] = {}
        for name, dtype, shape in head["arrays"]:
            arrays[name] = np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)
            offset += arrays[name].nbytes
        return Snapshot(head["facts"], arrays)

    def _numbers(self) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _path(self, number: int) -> Path:
        return self._directory / f"snapshot-{number:012}"


def _raw(array: np.ndarray) -> memoryview | bytes:
    return array.data.cast("B") if array.size else b""


def _write_whole(descriptor: int, data: memoryview | bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
