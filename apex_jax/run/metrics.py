"""Metrics of one process: written for TensorBoard and as JSON lines, which can be read while they grow.

The x-axis of every chart is emulator frames of the whole run. Each process writes under its own name:

    <directory>/metrics/<name>.jsonl     one JSON object a line; a restarted process appends
    <directory>/tensorboard/<name>/      one event file for each start of the process

A line holds "time" (unix seconds), "seconds" (since the process started), "step" (frames), and a value for each tag.
Within one start of a process, "time" grows exactly as "seconds" does, so that a change of the wall clock does not move
the points of a chart.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import resource
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, SupportsFloat, TypeGuard

import numpy as np
from numpy.typing import ArrayLike

from apex_jax.host.disk import naming, open_regular, read_regular

_log = logging.getLogger(__name__)

TAGS = {
    *("charts/environment_frames_per_second", "charts/updates_per_second", "charts/learning_rate"),
    *("charts/elapsed_minutes", "charts/episodic_return", "charts/episodic_return_epsilon_<band>"),
    *("charts/episodic_return_noise_<band>", "charts/episodic_length", "charts/info_<name>"),
    *("losses/td_loss", "losses/q_values", "losses/gradient_norm", "losses/policy_loss", "losses/policy_gradient_norm"),
    *("losses/action_saturation", "losses/priority_mean", "losses/priority_max"),
    "own/<name>",
    *("learner/weights_version", "learner/updates", "learner/failed_checkpoints", "learner/checkpoint_age_seconds"),
    *("learner/wait_seconds_share", "learner/replay_disconnects"),
    *("storage/failed_copies", "storage/copy_age_seconds"),
    *("eval/episodic_return", "eval/episodic_return_median", "eval/episodic_return_lowest"),
    *("eval/episodic_return_highest", "eval/episodic_return_standard_deviation", "eval/episodes", "eval/seconds"),
    *("eval/human_normalized_score", "eval/film_return", "eval/info_<name>", "eval/updates", "eval/frames"),
    *("replay/size_transitions", "replay/bytes", "replay/samples_per_insert", "replay/sample_age_seconds"),
    *("replay/inserts_per_second", "replay/samples_per_second", "replay/dropped_<reason>", "replay/actors"),
    *("replay/journal_bytes", "replay/journal_errors"),
    *("ledger/produced", "ledger/stored", "ledger/dropped_<reason>"),
    *("actor/environment_steps", "actor/steps_per_second", "actor/wait_seconds_share", "actor/replay_disconnects"),
    "actor/weights_age_seconds",
    "system/resident_memory_bytes",
}
"""All tags; docs/metrics.md explains each. `<...>` stands for any ending."""

_OPEN_TAGS = tuple(tag.partition("<")[0] for tag in TAGS if "<" in tag)
TRAINING_TAG = "charts/episodic_return_"  # followed by the name of a band, see `Bands.names`
EVALUATED_RETURN = "eval/episodic_return"
TRAINING_INFO, EVALUATED_INFO = "charts/info_", "eval/info_"  # followed by a name in `metrics.info`


class Bands(NamedTuple):
    """Ranges of a measure of exploration; the returns of training games are reported separately for each range."""

    measure: str
    edges: tuple[float, ...]  # a band includes its lower edge
    largest: float  # largest possible value of the measure

    @property
    def names(self) -> list[str]:
        """The names of all bands, such as "epsilon_0.01_to_0.05"."""
        between = (f"{low:g}_to_{high:g}" for low, high in pairwise(self.edges))
        names = [f"below_{self.edges[0]:g}", *between, f"above_{self.edges[-1]:g}"]
        return [f"{self.measure}_{name}" for name in names]

    def split(self, exploration: np.ndarray, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """Splits `values` [N] by the band of `exploration` [N]: (name, values) of each band that is not empty."""
        bands = np.searchsorted(np.array(self.edges), np.asarray(exploration, np.float64), side="right")
        return [(self.names[band], values[bands == band]) for band in np.unique(bands).tolist()]


EPSILON_BANDS = Bands("epsilon", (0.01, 0.05, 0.2), 1.0)
NOISE_BANDS = Bands("noise", (0.1, 0.2, 0.4), 10.0)  # standard deviations, relative to actions in [-1, 1]


class MetricsWriter:
    """Writes the metrics of one process; no two live processes share a name.

    Disk errors are not raised: a record that cannot be written is lost and counted in `failed_writes`, the first error
    is logged, and the next write tries again. Each write opens and closes its files, so the writer needs no `close`.
    """

    def __init__(self, directory: str, name: str, has_tensorboard: bool = True) -> None:
        self.failed_writes = 0
        self._has_tensorboard = has_tensorboard
        self._started_at, self._started = time.time(), time.monotonic()
        self._lines_path = Path(directory, "metrics", f"{name}.jsonl")
        # Nanoseconds and the process id: a restart within the same second needs a file of its own.
        events_name = f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        self._events_path = Path(directory, "tensorboard", name, events_name)

    def write(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Writes `values` at `step` environment frames.

        A value that is not finite is null in JSON and omitted in TensorBoard. Raises ValueError for a tag not in TAGS.
        """
        for tag in values:
            if not is_tag(tag):
                raise ValueError(f"unknown tag {tag!r}: apex_jax.run.metrics.TAGS has every tag that is written")
        seconds = time.monotonic() - self._started
        now = self._started_at + seconds
        finite = {tag: float(value) for tag, value in values.items() if math.isfinite(value)}
        line = {"time": now, "seconds": seconds, "step": int(step)}
        text = json.dumps(line | {tag: finite.get(tag) for tag in values}) + "\n"
        self._try(self._lines_path, partial(append_line, line=text.encode()))
        if self._has_tensorboard:
            self._try(self._events_path, partial(append_event, now=now, step=int(step), values=finite))

    def _try(self, path: Path, append: Callable[[Path], None]) -> None:
        try:
            append(path)
        except OSError as error:
            self.failed_writes += 1
            if self.failed_writes == 1:
                _log.warning("cannot write metrics (logged once, retried at each write): %s: %s", path, error)


def is_tag(tag: str) -> bool:
    """Returns whether TAGS has this tag, or one with `<...>` for its ending."""
    return "<" not in tag and (tag in TAGS or any(tag.startswith(start) and tag != start for start in _OPEN_TAGS))


class RateMeter:
    """Turns a growing total into a rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, float] | None = None  # seconds, total
        self.rate = 0.0  # as of the last call

    def update(self, total: float) -> float:
        """Returns the growth per second since the last call; 0 at the first, and if a restart lowered the total."""
        now = self._clock()
        if self._last is None:
            self._last = (now, total)
        seconds = now - self._last[0]
        if seconds > 0:
            self.rate = max(0.0, (total - self._last[1]) / seconds)
            self._last = (now, total)
        return self.rate


class Means:
    """Accumulates the means of numbers, and of the elements of arrays, by tag."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, tag: str, values: ArrayLike) -> None:
        """Adds a number, or every element of an array."""
        array = np.asarray(values, np.float64)
        self.counts[tag] += array.size
        self._sums[tag] += float(array.sum())

    def take(self) -> dict[str, float]:
        """Returns the mean of each tag to which numbers were added, and begins anew."""
        means = {tag: self._sums[tag] / count for tag, count in self.counts.items() if count}
        self.counts.clear()
        self._sums.clear()
        return means


def resident_memory_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# The files: JSON lines and TensorBoard events, appended whole or not at all; and the lines, read back -----------------


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
    from tensorboardX.proto.event_pb2 import Event  # not at the top: it takes 0.3 s, and the start of a run writes none
    from tensorboardX.proto.summary_pb2 import Summary

    scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    record = _record(Event(wall_time=now, step=step, summary=Summary(value=scalars)))
    with _open_to_append(path) as file:
        version = b"" if file.tell() else _record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        _write_whole(file, version + record)


def _record(event: Any) -> bytes:
    """Returns a message framed as a TFRecord: length, checksum of the length, message, checksum of the message."""
    from tensorboardX.record_writer import masked_crc32c

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
