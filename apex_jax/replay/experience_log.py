"""A log of the replay's events, in files that are only appended to.

A file is a sequence of records. A record is a header of fixed size with its own checksum, and a body, such as that of a
segment. When `flush` returns, the records are in the kernel's buffers, so a killed process loses none; a loss of power
loses the records since the last `sync`. The log is read up to its first damaged record; the rest is set aside.
Another thread may sync a file that is being written, which is then synced again later.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from apex_jax.host.disk import damaged_path, lock_file, read_regular, set_damaged_aside, synchronize
from apex_jax.replay.header import CorruptFile, Header, JournalError, unreadable
from apex_jax.types import SegmentRecord

_log = logging.getLogger(__name__)

FILE_BYTES = 2**25  # a file of this size is closed; only whole files are deleted
RECORDS_AT_ONCE = 256  # per system call
BYTES_AT_ONCE = 2**23  # per system call, approximately
RETRY_SECONDS = 5.0  # from a disk error to the next attempt
SPARE_EVENTS = 4096  # while the disk fails, so many records are kept in addition to one per segment of the ring

SEGMENT = 0  # kind of a record whose body is a segment; the caller defines the other kinds

_HEADER = struct.Struct("<4sIQQQQQIII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
_MARK = b"apxr"
NAME = re.compile(r"segments-([0-9]{20})\.log")  # first event


class TornRecord(CorruptFile):
    """The file ends before the end of a record."""


class Record(NamedTuple):
    """An event."""

    event: int  # 1, 2, 3 ... over the whole run
    kind: int
    insertion_id: int  # of the stored segment; 0 if the record stores none
    peer_id: int
    sequence: int
    produced: int  # by the actor so far
    transitions: int
    body: bytes


class _Pending(NamedTuple):
    header: bytes
    body: bytes
    insertion_id: int


@dataclass
class LogFile:
    """A file of the log."""

    path: Path
    num_bytes: int = 0  # up to the end of its last sound record
    last_insertion_id: int = 0  # largest insertion id of its records


class ExperienceLog:
    """The log of one replay server, which locks the directory until `close`."""

    def __init__(self, directory: Path | None, header: Header, capacity_segments: int) -> None:
        """`directory`: None = the log is empty, and drops appended records. Raises JournalError.

        `capacity_segments`: of the ring; limits the pending records while the disk fails.
        """
        self.last_event = 0
        self.errors = 0  # disk errors since the start
        self._directory = directory
        self._header = header
        self.pending: deque[_Pending] = deque(maxlen=capacity_segments + SPARE_EVENTS)
        self._files: list[LogFile] = []  # the last one is open for writing
        self._descriptor: int | None = None
        self.failure = ""  # of the last write; empty if it succeeded
        self._retry_seconds = 0.0
        self._lock = _locked(directory) if directory is not None else None

    # Writing

    def append(self, kind: int, insertion_id: int, segment: SegmentRecord) -> None:
        """Queues a record for the next `flush`, with the fields of a segment; `kind`, `insertion_id`: see `Record`."""
        if self._directory is None:
            return
        self.last_event += 1
        *numbers, body, crc = segment
        header = _HEADER.pack(_MARK, kind, self.last_event, insertion_id, *numbers, len(body), crc)
        self.pending.append(_Pending(header + _CRC.pack(zlib.crc32(header)), body, insertion_id))

    def flush(self, now_seconds: float) -> None:
        """Writes all pending records. After a disk error they stay pending, up to a limit, and are written later.

        Every error is counted; only the first of a series is logged.
        """
        if not self.pending or now_seconds < self._retry_seconds:
            return
        try:
            if self.failure and self._descriptor is not None:  # the write may have left a part of its records
                os.ftruncate(self._descriptor, self._files[-1].num_bytes)
            while self.pending:
                self._write_some()
        except OSError as error:
            self.errors += 1
            if not self.failure:
                what = "cannot write segments to %s (logged once, retried): %s; the replay continues in memory"
                _log.warning(what, self._directory, error)
            self.failure = f"cannot write segments to {self._directory}: {error}"
            self._retry_seconds = now_seconds + RETRY_SECONDS
            return
        if self.failure:
            _log.info("segments are written to %s again", self._directory)
            self.failure = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self._files)

    @property
    def paths(self) -> list[Path]:
        """The files, for `sync` on another thread."""
        return [file.path for file in self._files]

    def obsolete_files(self, oldest_insertion_id: int) -> list[LogFile]:
        """Returns the closed files of older segments only."""
        closed = self._files if self._descriptor is None else self._files[:-1]
        return [file for file in closed if file.last_insertion_id < oldest_insertion_id]

    def delete(self, files: list[LogFile]) -> None:
        """Deletes closed files."""
        self._files = [file for file in self._files if file not in files]
        for file in files:
            with contextlib.suppress(OSError):
                file.path.unlink()

    def close(self) -> None:
        """Closes the file and unlocks the directory."""
        with contextlib.suppress(OSError):
            self._close_file()
        if self._lock is not None:
            os.close(self._lock)

    def _write_some(self) -> None:
        """Writes the oldest pending records with one system call. Raises OSError."""
        if self._descriptor is None or self._files[-1].num_bytes >= FILE_BYTES:
            self._open_file()
        records, num_bytes = list[_Pending](), 0
        for record in self.pending:
            if len(records) == RECORDS_AT_ONCE or num_bytes >= BYTES_AT_ONCE:
                break
            records.append(record)
            num_bytes += len(record.header) + len(record.body)
        assert self._descriptor is not None
        buffers = [part for record in records for part in (record.header, record.body) if part]
        if os.writev(self._descriptor, buffers) != num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = self._files[-1]
        file.num_bytes += num_bytes
        for record in records:
            file.last_insertion_id = max(file.last_insertion_id, record.insertion_id)
            self.pending.popleft()

    def _open_file(self) -> None:
        """Opens the next file. One of the same name, which a killed server has left, holds no whole record."""
        assert self._directory is not None
        self._close_file()
        self._header.write()
        path = self._directory / f"segments-{self.last_event - len(self.pending) + 1:020}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o644)
        self._files.append(LogFile(path))

    def _close_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)  # frees the descriptor even if it raises

    # Reading, before anything is written

    def read(self) -> Iterator[Record]:
        """Yields the records before the first damaged one, oldest first, and sets the rest aside.

        Raises JournalError for a file that cannot be read, or cannot be set aside.
        """
        names = self._directory.iterdir() if self._directory is not None else ()
        paths = sorted(path for path in names if NAME.fullmatch(path.name))
        for place, path in enumerate(paths):
            file, later = LogFile(path), paths[place + 1 :]
            try:
                yield from self._read_file(file)
            except OSError as error:  # the file may be whole, and all later ones, too
                raise unreadable(path, error) from None
            except CorruptFile as error:
                next_event = int(later[0].stem.split("-")[1]) if later else 0
                if not isinstance(error, TornRecord) or next_event > self.last_event + 1:
                    self._set_aside(file, later, error)
                    return
                # The server was killed while it wrote.
                with contextlib.suppress(OSError):  # if it fails, the next start tries again
                    os.truncate(path, file.num_bytes)

    def _read_file(self, file: LogFile) -> Iterator[Record]:
        """Yields the records of a file. Raises CorruptFile or OSError."""
        data = read_regular(file.path)
        if not data:
            raise TornRecord("it is empty")
        while file.num_bytes < len(data):
            record, end = _record_at(data, file.num_bytes)
            if not file.num_bytes:  # otherwise it is in the list, which has files with sound records only
                self._files.append(file)
            file.num_bytes = end
            file.last_insertion_id = max(file.last_insertion_id, record.insertion_id)
            self.last_event = record.event
            yield record

    def _set_aside(self, file: LogFile, later: list[Path], error: Exception) -> None:
        """Renames the files after the damaged one, the last one first; copies the damaged file, and cuts off its end
        from the damage on.
        """
        num_bytes = file.path.lstat().st_size - file.num_bytes
        message = "%s is damaged at byte %d (%s): its last %d bytes and %d later files are left out, kept as damaged-*"
        _log.warning(message, file.path, file.num_bytes, error, num_bytes, len(later))
        try:
            for path in later[::-1]:
                set_damaged_aside(path)
            if file.num_bytes:
                shutil.copyfile(file.path, damaged_path(file.path))
                os.truncate(file.path, file.num_bytes)
            else:  # an empty file would look torn at the next start, before a gap in the numbers of the next file
                set_damaged_aside(file.path)
        except OSError as failure:
            raise JournalError(
                f"{file.path} is damaged and cannot be set aside ({failure}): make room, or move it away"
            ) from None


def _record_at(data: bytes, offset: int) -> tuple[Record, int]:
    """Returns the record at `offset`, and the offset of its end. Raises CorruptFile."""
    start = offset + HEADER_BYTES
    if start > len(data):
        raise TornRecord("it ends within the header of a record")
    _, kind, event, *numbers, length, crc = _HEADER.unpack_from(data, offset)
    if zlib.crc32(data[offset : offset + _HEADER.size]) != _CRC.unpack_from(data, offset + _HEADER.size)[0]:
        raise CorruptFile("the checksum of a record's header is wrong")
    body = data[start : start + length]
    if len(body) < length:
        raise TornRecord("it ends within a record")
    if zlib.crc32(body) != crc:
        raise CorruptFile("the checksum of a record is wrong")
    return Record._make((event, kind, *numbers, body)), start + length


def sync(paths: list[Path]) -> None:
    """Makes the files survive a loss of power. Raises OSError."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            synchronize(path)


def _locked(directory: Path) -> int:
    """Creates the directory, and locks it until the returned descriptor is closed. Raises JournalError."""
    what = f"another replay server is using {directory}: stop it, or give this one another run_directory"
    try:
        return lock_file(directory / "lock", JournalError(what))
    except OSError as error:
        raise JournalError(
            f"{directory} cannot hold the replay: {error}; set run_directory, or replay.journal=false"
        ) from None
