"""The files of metrics: JSON lines and TensorBoard events, appended whole or not at all; and the lines, read back."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeGuard

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from apex_jax.host.disk import naming, open_regular, read_regular

LARGEST = 3.4e38


def append_line(path: Path, line: bytes) -> None:
    """Appends a line, whole or not at all; if the last line of the file is torn, starts a new one. Raises OSError."""
    with naming(path), _open_to_append(path) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # an earlier process was killed in the middle of a line
                line = b"\n" + line
        _write_whole(file, line)


def append_event(path: Path, now: float, step: int, values: Mapping[str, float]) -> None:
    """Appends the scalars of one step to an event file of TensorBoard, whole or not at all. Raises OSError.

    tensorboardX's SummaryWriter is not used, only its message types: its thread ends at the first disk error; then its
    queue of ten is never emptied, and the eleventh `add_scalar` blocks forever.
    """
    scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    record = _record(Event(wall_time=now, step=step, summary=Summary(value=scalars)))
    with _open_to_append(path) as file:
        version = b"" if file.tell() else _record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        _write_whole(file, version + record)


def _record(event: Any) -> bytes:
    """Returns a message framed as a TFRecord: length, checksum of the length, message, checksum of the message."""
    body: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(body))
    return length + struct.pack("<I", masked_crc32c(length)) + body + struct.pack("<I", masked_crc32c(body))


def _open_to_append(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b", buffering=0)


def _write_whole(file: IO[bytes], data: bytes) -> None:
    """Appends all of `data` or nothing: a partial record would make all later ones unreadable. Raises OSError."""
    size = file.tell()
    if file.write(data) != len(data):
        file.truncate(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class MetricsFollower:
    """Reads the new lines of a growing JSONL file, which need not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._offset = 0

    def read_new(self) -> list[dict[str, Any]]:
        """Returns the lines completed since the last call; all lines if the file has become shorter.

        Returns no lines if the file cannot be read.
        """
        try:
            with open(open_regular(self._path, os.O_RDONLY), "rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return _parse_lines(complete)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines a `MetricsWriter` wrote, without torn ones. Raises OSError if the file cannot be read."""
    data = read_regular(Path(path))
    return _parse_lines(data[: data.rfind(b"\n") + 1])


def _parse_lines(data: bytes) -> list[dict[str, Any]]:
    return [values for line in json_lines(data) if (values := checked_line(line)) is not None]


def json_lines(data: bytes) -> list[Any]:
    """Returns the value of each line, without the lines that are no JSON, such as those torn by a kill."""
    values = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return values


def checked_line(line: object) -> dict[str, Any] | None:
    """Returns a line of metrics without the values that cannot be metrics; None if it is not a line of metrics."""
    if not isinstance(line, dict):
        return None
    values = {tag: value for tag, value in line.items() if value is None or is_number(value)}
    return values if all(values.get(name) is not None for name in ("time", "seconds", "step")) else None


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value read from a file can be a metric: a finite number that fits in a float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
