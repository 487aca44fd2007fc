"""The journal's snapshots: priorities, counters and random state in one file; the newest sound one is read.

A snapshot is a file of `numpy.savez`, whose zip format has a CRC of each array; the array `facts` is a JSON object. It
is written atomically and named after its number; the newest two are kept.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from apex_jax.config import Config
from apex_jax.host.disk import atomic_write, naming, read_regular, set_damaged_aside
from apex_jax.host.errors import first_line
from apex_jax.replay.buffer import BufferState
from apex_jax.replay.header import CorruptFile, Header, unreadable
from apex_jax.replay.ledger import Ledger
from apex_jax.replay.rate_limiter import RateLimiter

_log = logging.getLogger(__name__)

KEPT = 2
BUFFER_ARRAYS = ("insertion_ids", "leaves", "ages_seconds")  # of `BufferState`; its other fields are facts
NAME = re.compile(r"snapshot-([0-9]{12})")


class Saved(NamedTuple):
    """The content of a snapshot."""

    event: int  # number of the last event that it contains
    buffer: BufferState
    limiter: dict[str, Any]
    ledger: Ledger


def ratio_of(config: Config) -> list[float]:
    """Returns the settings that must not have changed if saved counters of the rate limiter are to be used."""
    return [config.replay.samples_per_insert, float(config.replay.min_size_to_sample)]


def pack_state(event: int, state: BufferState, limiter: RateLimiter, config: Config, ledger: Ledger) -> dict[str, Any]:
    """Returns the arrays of a snapshot."""
    buffer = state._asdict()
    arrays = {name: buffer.pop(name) for name in BUFFER_ARRAYS} | {"actors": ledger.actors()}
    facts = {
        "event": event,
        "buffer": buffer,
        "limiter": {"inserted": limiter.inserted, "sampled": limiter.sampled, "ratio": ratio_of(config)},
        "ledger": ledger.counters(),
    }
    return arrays | {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}


def unpack_state(data: bytes) -> Saved:
    """Returns the content of a snapshot's file. Raises CorruptFile."""
    try:
        with np.load(io.BytesIO(data)) as file:
            arrays = dict(file)
        facts = json.loads(arrays["facts"].tobytes())
        state = BufferState(**facts["buffer"], **{name: arrays[name] for name in BUFFER_ARRAYS})
        return Saved(facts["event"], state, facts["limiter"], Ledger.of(arrays["actors"], **facts["ledger"]))
    except Exception as error:  # zipfile and NumPy raise any on damaged files
        raise CorruptFile(first_line(error)) from None


class Snapshots:
    """The snapshots of a directory; no other process writes to it."""

    def __init__(self, directory: Path, header: Header) -> None:
        self._directory = directory
        self._header = header

    def write(self, arrays: dict[str, Any]) -> None:
        """Writes a snapshot, which survives a loss of power when this returns; deletes old ones. Raises OSError."""
        self._header.write()
        numbers = self._numbers()
        path = self._path(max(numbers, default=0) + 1)
        with naming(path), atomic_write(path) as half, open(half, "xb") as file:
            np.savez(file, **arrays)
        for number in numbers[: -(KEPT - 1)]:
            with contextlib.suppress(OSError):
                self._path(number).unlink()

    def read_newest(self) -> Saved | None:
        """Returns the newest sound snapshot, or None if there is none.

        A damaged snapshot is logged and set aside; one that cannot be read raises JournalError.
        """
        for number in reversed(self._numbers()):
            path = self._path(number)
            try:
                return unpack_state(read_regular(path, sys.maxsize))
            except OSError as error:  # it may be whole
                raise unreadable(path, error) from None
            except CorruptFile as error:
                _log.warning("snapshot %s is damaged, trying the one before: %s", path, error)
                with contextlib.suppress(OSError):  # a read-only disk
                    set_damaged_aside(path)
        return None

    def _numbers(self) -> list[int]:
        found = (NAME.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _path(self, number: int) -> Path:
        return self._directory / f"snapshot-{number:012}"
