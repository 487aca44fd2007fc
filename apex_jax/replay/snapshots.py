"""The journal's snapshots: priorities, counters and random state in one file; the newest sound one is read.

Every file of the journal, those of `experience_log` too, begins with a head:

    8 bytes of magic | format | length of the facts | CRC-32 of these three and of the facts | facts, a JSON object

All numbers are uint32, little-endian. A damaged head raises CorruptFile; an intact one of another format or
configuration raises JournalError. The facts of a snapshot are those of the state, the name, dtype and shape of each
array, and the CRC-32 of all arrays, which follow, concatenated and little-endian. A snapshot is written atomically and
named after its number; the newest two are kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from apex_jax.config import Config
from apex_jax.host.disk import open_regular, read_regular, set_damaged_aside, write_durably
from apex_jax.host.errors import RunError
from apex_jax.replay.buffer import BufferState
from apex_jax.replay.ledger import Ledger
from apex_jax.replay.rate_limiter import RateLimiter
from apex_jax.run.compatibility import describe_differences, differences
from apex_jax.run.identity import is_identity, new_identity
from apex_jax.types import SegmentSpec

_log = logging.getLogger(__name__)

FORMAT = 4
_PREFIX = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
MAGIC = b"APEXSNAP"
KEPT = 2
MAX_HEAD_BYTES = 2**20  # far more than the facts of any file take
BUFFER_ARRAYS = ("insertion_ids", "leaves", "ages_seconds")  # of `BufferState`; its other fields are facts
NAME = re.compile(r"snapshot-([0-9]{12})")


class JournalError(RunError):
    """The existing journal cannot be used; the message has the reason and the fix."""


class CorruptFile(ValueError):
    """Bytes that differ from what was written; the message names the difference."""


class FileHeader:
    """The configuration and run of a journal; files of another configuration or run are rejected."""

    def __init__(self, compatibility_key: str, spec: SegmentSpec, run: str = "") -> None:
        """`compatibility_key`: see `Config`; `run`: see `apex_jax.run.identity`, empty = taken from the files."""
        self.run = run
        self.replay_id = new_identity()  # unless a file contains one
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in spec._asdict().items()}
        if not spec.action.is_masked:  # which earlier releases did not have
            fields["action"] = list(spec.action[: spec.action._fields.index("is_masked")])
        self._configuration = {"compatibility_key": compatibility_key, "segments": json.dumps(fields)}

    @property
    def facts(self) -> dict[str, str]:
        """The facts for the head of a file, without the run if it is not known yet."""
        return self._configuration | {"replay": self.replay_id} | ({"run": self.run} if self.run else {})

    def check(self, path: Path, facts: dict[str, Any]) -> None:
        """Adopts the replay id and the run of a file. Raises JournalError for another configuration or run."""
        for name, ours in self._configuration.items():
            theirs = facts.get(name)
            is_key = name == "compatibility_key"  # earlier releases had fewer keys
            if bool(differences(str(theirs), ours)) if is_key else theirs != ours:
                raise JournalError(
                    f"{path} is the replay of another configuration: {describe_differences(str(theirs), ours)}; use the"
                    f" configuration it was made with, another run_directory, or move {path.parent} away"
                )
        if is_identity(replay_id := str(facts.get("replay"))):
            self.replay_id = replay_id
        run = facts.get("run")
        if isinstance(run, str) and is_identity(run):
            self.run = self.run or run
            if run != self.run:
                raise JournalError(
                    f"{path} is the replay of run {run}, {path.parent.parent} is of run {self.run}: use the"
                    f" run_directory of its run, or move {path.parent} away"
                )


def pack_head(magic: bytes, facts: dict[str, Any]) -> bytes:
    """Returns the head of a file."""
    text = json.dumps(facts, allow_nan=False).encode()
    prefix = _PREFIX.pack(magic, FORMAT, len(text))
    return prefix + _CRC.pack(crc32(text, crc32(prefix))) + text


def unpack_head(path: Path, data: memoryview, magic: bytes) -> tuple[dict[str, Any], int]:
    """Returns the facts at the start of `data`, and the offset of their end.

    Raises CorruptFile, and JournalError for a sound head of another format; `path` is for the message.
    """
    start = _PREFIX.size + _CRC.size
    if len(data) < start:
        raise CorruptFile(f"it ends after {len(data)} bytes")
    found, version, length = _PREFIX.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _PREFIX.size)
    if found != magic:
        raise CorruptFile("it does not begin as such a file does")
    if length > len(data) - start:
        raise CorruptFile(f"its head of {length} bytes is cut short")
    text = data[start : start + length]
    if crc32(text, crc32(data[: _PREFIX.size])) != crc:
        raise CorruptFile("the checksum of its head is wrong")
    if version != FORMAT:
        raise JournalError(
            f"{path} has format {version}, this release reads format {FORMAT}; use the release that wrote it, another"
            f" run_directory, or move {path.parent} away"
        )
    return json.loads(bytes(text)), start + length


def unreadable(path: Path, error: OSError) -> JournalError:
    """Returns the error of a file that cannot be read."""
    return JournalError(f"{path} cannot be read ({error.strerror}): mend that, or move it away")


def check_head(path: Path, magic: bytes, header: FileHeader) -> None:
    """Raises JournalError if a file is of another configuration, run or format, or cannot be read; a damaged one is
    passed over.
    """
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            head, _ = unpack_head(path, memoryview(file.read(MAX_HEAD_BYTES)), magic)
    except OSError as error:
        raise unreadable(path, error) from None
    except CorruptFile:
        return
    header.check(path, head)


class Saved(NamedTuple):
    """The content of a snapshot."""

    event: int  # number of the last event that it contains
    buffer: BufferState
    limiter: dict[str, Any]
    ledger: Ledger


def ratio_of(config: Config) -> list[float]:
    """Returns the settings that must not have changed if saved counters of the rate limiter are to be used."""
    return [config.replay.samples_per_insert, float(config.replay.min_size_to_sample)]


def pack_state(
    event: int, state: BufferState, limiter: RateLimiter, config: Config, ledger: Ledger
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the facts and arrays of a snapshot."""
    buffer = state._asdict()
    arrays = {name: buffer.pop(name) for name in BUFFER_ARRAYS} | {"accounts": ledger.to_array()}
    facts = {
        "event": event,
        **buffer,
        "limiter": {"inserted": limiter.inserted, "sampled": limiter.sampled, "ratio": ratio_of(config)},
        "welcomed": ledger.highest_actor_number,
        "refused": dict(ledger.refused),
    }
    return facts, arrays


def _unpack_state(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Saved:
    buffer = {**facts, **arrays}
    state = BufferState(**{name: buffer[name] for name in BufferState._fields})
    ledger = Ledger.from_array(arrays["accounts"], facts["refused"], facts["welcomed"])
    return Saved(facts["event"], state, facts["limiter"], ledger)


class Snapshots:
    """The snapshots of a directory; no other process writes to it."""

    def __init__(self, directory: Path, header: FileHeader) -> None:
        self._directory = directory
        self._header = header

    def write(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a snapshot, which survives a loss of power when this returns; deletes old ones. Raises OSError."""
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        crc = 0
        for array in arrays.values():
            crc = crc32(_raw(array), crc)
        layout = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        head = pack_head(MAGIC, {**self._header.facts, "facts": dict(facts), "arrays": layout, "crc": crc})
        numbers = self._numbers()
        path = self._path(max(numbers, default=0) + 1)
        write_durably(path, head, *map(_raw, arrays.values()))
        for number in numbers[: -(KEPT - 1)]:
            with contextlib.suppress(OSError):
                self._path(number).unlink()

    def read_newest(self) -> Saved | None:
        """Returns the newest sound snapshot, or None if there is none.

        A damaged snapshot is logged and set aside; one that cannot be read, or a sound one of another configuration,
        raises JournalError.
        """
        for number in reversed(self._numbers()):
            try:
                return self._read(self._path(number))
            except OSError as error:  # it may be whole
                raise unreadable(self._path(number), error) from None
            except CorruptFile as error:
                _log.warning("snapshot %s is damaged, trying the one before: %s", self._path(number), error)
                with contextlib.suppress(OSError):  # a read-only disk
                    set_damaged_aside(self._path(number))
        return None

    def _read(self, path: Path) -> Saved:
        data = memoryview(read_regular(path, sys.maxsize))
        head, offset = unpack_head(path, data, MAGIC)
        self._header.check(path, head)
        if crc32(data[offset:]) != head["crc"]:
            raise CorruptFile("the checksum of its arrays is wrong")
        arrays: dict[str, np.ndarray] = {}
        for name, dtype, shape in head["arrays"]:
            arrays[name] = np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)
            offset += arrays[name].nbytes
        return _unpack_state(head["facts"], arrays)

    def _numbers(self) -> list[int]:
        found = (NAME.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _path(self, number: int) -> Path:
        return self._directory / f"snapshot-{number:012}"


def _raw(array: np.ndarray) -> memoryview | bytes:
    return array.data.cast("B") if array.size else b""
