"""A log of the replay's events, in files that are only appended to.

A file is a head and records. A record is a header of fixed size with its own checksum, and a body, such as that of a
segment. When `flush` returns, the records are in the kernel's buffers, so a killed process loses none; a loss of power
loses the records since the last `sync`. A file is read up to its first damaged record. No file is opened for writing
twice and no name is reused. Another thread may sync a file that is being written, which is then synced again later.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import struct
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from apex_jax.host.disk import lock, open_regular, read_regular, synchronize
from apex_jax.replay.snapshots import CorruptFile, Identity, JournalError, pack_head, unpack_head

_log = logging.getLogger(__name__)

MAGIC = b"APEXSEGM"
FILE_BYTES = 2**25  # a file of this size is closed; only whole files are deleted
RECORDS_AT_ONCE = 256  # per system call
BYTES_AT_ONCE = 2**23  # per system call, approximately
FIRST_DELAY_SECONDS = 1.0  # from a disk error to the next attempt; doubled each time
LONGEST_DELAY_SECONDS = 60.0  # limit of that delay
SPARE_EVENTS = 4096  # at most this many records are pending in addition to one per segment of the ring

SEGMENT = 0  # kind of a record whose body is a segment; the caller defines the other kinds

_HEADER = struct.Struct("<4sIQQQQQIII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
_MARK = b"apxr"
LARGEST_FIRST_EVENT = 2**62  # that a file's name may claim, so that later events fit in 64 bits
_NAME = re.compile(r"segments-([0-9]{20})(?:-[0-9]{6})?\.log")  # first event, attempt (missing in old files)


class Record(NamedTuple):
    """An event."""

    event: int  # 1, 2, 3 ... over the whole run
    kind: int
    insertion_id: int  # of the stored segment; 0 if the record stores none
    peer_id: int
    sequence: int
    environment_steps: int
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
    num_bytes: int
    records: int = 0
    last_insertion_id: int = 0  # largest insertion id of its records
    is_unreadable: bool = False


class ExperienceLog:
    """The log of one replay server, which locks the directory until `close`."""

    def __init__(self, directory: Path | None, identity: Identity, capacity_segments: int) -> None:
        """`directory`: None = the log is empty, and drops what is appended. Raises JournalError.

        `capacity_segments`: of the ring; limits the pending records while the disk fails.
        """
        self.last_event = 0
        self.errors = 0  # disk errors since the start
        self.left_out: Counter[str] = Counter()  # records and files that `read` left out, by reason
        self._directory = directory
        self._identity = identity
        self._max_pending = capacity_segments + SPARE_EVENTS
        self._pending: deque[_Pending] = deque()
        self._files: list[LogFile] = []  # the last one is open for writing
        self._descriptor: int | None = None
        self._skipped_event = 0  # unreadable bytes may hold events up to this number
        self._attempts = 0  # number of files created, so that each has a new name
        self._unsynced: list[Path] = []
        self._delay_seconds = 0.0
        self._retry_seconds = 0.0
        self._lock = _locked(directory) if directory is not None else None

    # Writing

    def append(
        self,
        kind: int,
        insertion_id: int,
        peer_id: int,
        sequence: int,
        environment_steps: int = 0,
        transitions: int = 0,
        body: bytes = b"",
        crc: int = 0,
    ) -> None:
        """Queues a record for the next `flush`. `crc`: zlib.crc32 of body; other fields as in `Record`."""
        if self._directory is None:
            return
        self.last_event += 1
        numbers = (insertion_id, peer_id, sequence, environment_steps)
        fields = (self.last_event, *numbers, transitions, len(body), crc)
        header = _HEADER.pack(_MARK, kind, *fields)
        self._pending.append(_Pending(header + _CRC.pack(zlib.crc32(header)), body, insertion_id))

    def flush(self, now_seconds: float) -> None:
        """Writes all pending records. After a disk error they stay pending, up to a limit, and are written later.

        Every error is counted; only the first of a series is logged.
        """
        if not self._pending or now_seconds < self._retry_seconds:
            self._bound_pending()
            return
        try:
            while self._pending:
                self._write_some()
        except OSError as error:
            self._give_up_for_now(error, now_seconds)
            return
        if self._delay_seconds:
            _log.info("segments are written to %s again", self._directory)
            self._delay_seconds = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self._files)

    def take_unsynced(self) -> list[Path]:
        """Returns the files that were read or written since the last call, for `sync` on another thread."""
        taken, self._unsynced = self._unsynced, []
        if self._descriptor is not None:
            self._unsynced.append(self._files[-1].path)
        return taken

    def obsolete_files(self, oldest_insertion_id: int) -> list[LogFile]:
        """Returns the closed files of older segments only."""
        closed = self._files if self._descriptor is None else self._files[:-1]
        return [file for file in closed if file.last_insertion_id < oldest_insertion_id]

    def delete(self, files: list[LogFile]) -> int:
        """Deletes closed files; returns their bytes, without those of files deleted before."""
        before = self.num_bytes
        self._files = [file for file in self._files if file not in files]
        for file in files:
            with contextlib.suppress(OSError):
                file.path.unlink()
        return before - self.num_bytes

    def not_synced(self, paths: list[Path]) -> None:
        """Takes back files that could not be synced, for the next `take_unsynced`."""
        self._unsynced += paths

    def close(self) -> None:
        """Closes the file and unlocks the directory."""
        with contextlib.suppress(OSError):
            self._close_file()
        if self._lock is not None:
            os.close(self._lock)

    def _write_some(self) -> None:
        if self._descriptor is not None and self._files[-1].num_bytes >= FILE_BYTES:
            self._close_file()
        if self._descriptor is None:
            self._open_file()
        assert self._descriptor is not None
        buffers: list[bytes] = []
        count = num_bytes = 0
        for pending in self._pending:
            if count == RECORDS_AT_ONCE or num_bytes >= BYTES_AT_ONCE:
                break
            buffers += [pending.header, pending.body] if pending.body else [pending.header]
            num_bytes += len(pending.header) + len(pending.body)
            count += 1
        if os.writev(self._descriptor, buffers) != num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = self._files[-1]
        file.num_bytes += num_bytes
        file.records += count
        for _ in range(count):
            file.last_insertion_id = max(file.last_insertion_id, self._pending.popleft().insertion_id)

    def _open_file(self) -> None:
        """Creates the next file. No old one is continued, because after a disk error it may end within a record."""
        head = pack_head(MAGIC, self._identity.facts)
        path, descriptor = self._make_file(self.last_event - len(self._pending) + 1)
        try:
            if os.write(descriptor, head) != len(head):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        self._descriptor = descriptor
        self._files.append(LogFile(path, len(head)))
        self._unsynced.append(path)

    def _make_file(self, first_event: int) -> tuple[Path, int]:
        """Creates a file; returns its path and descriptor."""
        assert self._directory is not None
        while True:
            self._attempts += 1
            path = self._directory / f"segments-{first_event:020}-{self._attempts:06}.log"
            with contextlib.suppress(FileExistsError):  # made by an earlier start
                return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def _close_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)  # frees the descriptor even if it raises

    def _give_up_for_now(self, error: OSError, now_seconds: float) -> None:
        """Cuts off an incomplete record, so that the file ends with a complete one, and schedules the next attempt."""
        self.errors += 1
        if not self._delay_seconds:
            _log.warning(
                "cannot write segments to %s (logged once, retried): %s; the replay continues in memory",
                self._directory,
                error,
            )
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._files[-1].num_bytes)
            with contextlib.suppress(OSError):
                self._close_file()
            if not self._files[-1].records:
                with contextlib.suppress(OSError):
                    self._files.pop().path.unlink()
        self._delay_seconds = min(max(2 * self._delay_seconds, FIRST_DELAY_SECONDS), LONGEST_DELAY_SECONDS)
        self._retry_seconds = now_seconds + self._delay_seconds
        self._bound_pending()

    def _bound_pending(self) -> None:
        while len(self._pending) > self._max_pending:
            self._pending.popleft()

    # Reading, before anything is written

    def read(self) -> Iterator[Record]:
        """Yields the records of each file up to the first damaged one, oldest first, and counts what is left out.

        Raises JournalError for a sound file of another configuration, before the first record.
        """
        names = self._directory.iterdir() if self._directory is not None else ()
        paths = [path for path in names if _NAME.fullmatch(path.name)]
        paths.sort(key=lambda path: (_first_event(path), len(path.name), path.name))
        for path in paths:
            self._check_head(path)
        for path in paths:
            yield from self._read_file(path)
        self.last_event = max(self.last_event, self._skipped_event)

    def keep_unreadable(self, insertion_id: int) -> None:
        """Keeps unreadable files, which somebody may repair, until the segment `insertion_id` has left the ring."""
        for file in self._files:
            if file.is_unreadable:
                file.last_insertion_id = insertion_id

    def _check_head(self, path: Path) -> None:
        try:
            with open(open_regular(path, os.O_RDONLY), "rb") as file:
                facts, _ = unpack_head(path, memoryview(file.read(2**16)), MAGIC)
        except (CorruptFile, OSError):  # logged when it is read
            return
        self._identity.check(path, facts)

    def _read_file(self, path: Path) -> Iterator[Record]:
        event = _first_event(path) - 1  # of the previous record
        try:
            data = read_regular(path)
            _, offset = unpack_head(path, memoryview(data), MAGIC)
        except (CorruptFile, OSError) as error:
            self.left_out["unreadable files"] += 1
            _log.warning("%s is left out: %s", path, error)
            num_bytes = path.lstat().st_size
            self._files.append(LogFile(path, num_bytes, is_unreadable=True))
            self._skip_events(event, num_bytes)
            return
        file = LogFile(path, len(data))
        self._files.append(file)
        self._unsynced.append(path)  # a killed server may have left it unsynced
        while offset < len(data):
            record, end = _record_at(data, offset)
            if record is None:
                self._leave_out(file, event, offset, is_torn=end > len(data))
                return
            file.records += 1
            file.last_insertion_id = max(file.last_insertion_id, record.insertion_id)
            event, offset = record.event, end
            if event <= self.last_event:  # from a copy of a file
                self.left_out["repeated records"] += 1
                continue
            self.last_event = event
            yield record

    def _leave_out(self, file: LogFile, event: int, offset: int, is_torn: bool) -> None:
        """Leaves out the rest of a file from a damaged record on; cuts off a torn one, which a killed server left.

        `event`: number of the record before.
        """
        num_bytes = file.num_bytes - offset
        if is_torn:
            self.left_out["torn records"] += 1
            with contextlib.suppress(OSError):  # if it fails, the next start logs this again
                os.truncate(file.path, offset)
            return
        self.left_out["bytes from damaged records on"] += num_bytes
        _log.warning("%s: the record at %d is damaged: %d bytes are left out", file.path, offset, num_bytes)
        file.is_unreadable = True
        self._skip_events(event, num_bytes)

    def _skip_events(self, event: int, num_bytes: int) -> None:
        """Reserves the event numbers that unreadable bytes may hold, so that a repaired file cannot collide."""
        self._skipped_event = max(self._skipped_event, event + num_bytes // HEADER_BYTES)


def _record_at(data: bytes, offset: int) -> tuple[Record | None, int]:
    """Returns the record at `offset`, or None if it is damaged, and the offset of its end."""
    start = offset + HEADER_BYTES
    if start > len(data):
        return None, start
    _, kind, event, insertion_id, peer_id, sequence, steps, transitions, length, crc = _HEADER.unpack_from(data, offset)
    if zlib.crc32(data[offset : offset + _HEADER.size]) != _CRC.unpack_from(data, offset + _HEADER.size)[0]:
        return None, start
    body = data[start : start + length]
    is_sound = len(body) == length and zlib.crc32(body) == crc
    record = Record(event, kind, insertion_id, peer_id, sequence, steps, transitions, body) if is_sound else None
    return record, start + length


def _first_event(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return min(int(match[1]), LARGEST_FIRST_EVENT)


def sync(paths: list[Path]) -> None:
    """Makes the files survive a loss of power. Raises OSError."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            synchronize(path)


def _locked(directory: Path) -> int:
    """Creates the directory, and locks it until the returned descriptor is closed. Raises JournalError."""
    path = directory / "lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError:  # a read-only disk can still be locked and read
            descriptor = open_regular(path, os.O_RDONLY)
    except OSError as error:
        raise JournalError(
            f"{directory} cannot hold the replay: {error}; set run_directory, or replay.journal=false"
        ) from None
    if not lock(directory, descriptor):
        os.close(descriptor)
        raise JournalError(
            f"another replay server is using {directory}: stop it, or give this one another run_directory"
        )
    return descriptor
