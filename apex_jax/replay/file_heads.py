"""The head of each file of the journal: its kind, format and configuration.

    8 bytes of magic | format | length of the facts | CRC-32 of these three and of the facts | facts, a JSON object

All numbers are uint32, little-endian. A damaged head raises CorruptFile; an intact one of another format or
configuration raises JournalError.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

from apex_jax.host.errors import RunError
from apex_jax.run.compatibility import differences, told
from apex_jax.run.identity import is_identity, new_identity
from apex_jax.types import SegmentSpec

FORMAT = 2
_PREFIX = struct.Struct("<8sII")
_CRC = struct.Struct("<I")


class JournalError(RunError):
    """The existing journal cannot be used; the message says why and what to do."""


class CorruptFile(ValueError):
    """Bytes that differ from what was written; the message says what is wrong."""


class Identity:
    """The configuration and run of a journal; files of another configuration or run are rejected."""

    def __init__(self, compatibility_key: str, spec: SegmentSpec, run: str = "") -> None:
        """`compatibility_key`: see `Config`; `run`: see `apex_jax.run.identity`, empty = taken from the files."""
        self.run = run
        self.replay_id = new_identity()  # unless a file contains one
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in spec._asdict().items()}
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
                    f"{path} is the replay of another configuration: {told(str(theirs), ours)}; use the"
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


def pack(magic: bytes, facts: dict[str, Any]) -> bytes:
    """Returns the head of a file."""
    text = json.dumps(facts, allow_nan=False).encode()
    prefix = _PREFIX.pack(magic, FORMAT, len(text))
    return prefix + _CRC.pack(zlib.crc32(text, zlib.crc32(prefix))) + text


def unpack(path: Path, data: memoryview, magic: bytes) -> tuple[dict[str, Any], int]:
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
    if zlib.crc32(text, zlib.crc32(data[: _PREFIX.size])) != crc:
        raise CorruptFile("the checksum of its head is wrong")
    if version != FORMAT:
        raise JournalError(
            f"{path} has format {version}, this release reads format {FORMAT}; use the release that wrote it, another"
            f" run_directory, or move {path.parent} away"
        )
    return json.loads(bytes(text)), start + length
