"""The report of this process: its identity, what it does, how fast, how far it is, and what is wrong.

It is made every second, written to the run directory, served at `addresses.status`, and tells systemd that the process
lives. `apex_jax.operations.records` is its reader.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from apex_jax.config import Config
from apex_jax.host.disk import open_regular
from apex_jax.operations.diagnosis import Diagnosis
from apex_jax.operations.records import REPORT_SECONDS, STARTING_SECONDS, STUCK_SECONDS, Record, report_path
from apex_jax.process import SUPERVISED, StopSignal
from apex_jax.run.metrics import resident_memory_bytes
from apex_jax.run.provenance import commit, version
from apex_jax.transport.addresses import is_loopback
from apex_jax.transport.http_link import StatusServer
from apex_jax.transport.wire import PROTOCOL_VERSION

_log = logging.getLogger(__name__)

LINE_SECONDS = 60.0  # between two lines in the log
HEARTBEAT_SECONDS = 10.0  # between two heartbeats for systemd
RESTART_SECONDS = 3 * HEARTBEAT_SECONDS  # without a heartbeat, until systemd restarts the process
# Not diagnosed: the records show what these say, and their warnings name logs that only a local run has.
SHOWN = ("actor/weights_age_", "learner/checkpoint_age_", "storage/copy_age_", "replay/size_")
ACTIVITIES = {  # by role: a metric and its unit, what the role does while it is positive, and what it may do else
    "learner": ("charts/updates_per_second", "updates/s", "learns", "waits for batches, or compiles"),
    "actor": ("actor/steps_per_second", "steps/s", "acts", "waits for the replay server, or compiles"),
    "replay": ("replay/inserts_per_second", "transitions/s stored", "stores segments", "waits for segments"),
}
STEADY = ("updates", "frames", "segments", "batches")  # counts that grow all the time; evaluations do not


class Count(NamedTuple):
    """A count of what the process does, such as updates."""

    number: int
    changed_seconds: float  # when it last changed; if it never did, when it was first read
    has_changed: bool  # since the start of the process


class ProcessReport:
    """A context whose thread makes the report. Set `describe` to the part of it that the role knows.

    `describe` is called on the thread, so that it must only read attributes. It may return, beside any values:
    `counts`, by name, of what the process has done; `metrics`, the newest values by tag; `peers`, by name, the state of
    a connection to a server or what a server knows of its clients; `errors` of its disk; `does`, what it does now.
    """

    def __init__(self, config: Config, role: str, name: str, stop: StopSignal):
        """`stop`: the process is healthy while the worker's loop keeps calling `stop.beat`, once in each iteration."""
        self.describe: Callable[[], Mapping[str, Any]] = dict
        self._config, self._role, self._name, self._stop = config, role, name, stop
        self._path = report_path(config.directory, name)
        self._started = time.monotonic()
        self._counts: dict[str, Count] = {}
        self._logged: dict[str, int] = {}  # the counts at the last line
        self._next_line = self._started + LINE_SECONDS
        self._values: dict[str, float] = {}  # newest value of each tag
        self._diagnosis = Diagnosis(config)
        self._heartbeats = Heartbeats()
        self._has_written = False
        self._making = threading.Lock()
        self._server: StatusServer | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def __enter__(self) -> ProcessReport:
        """Binds the address. Raises StatusError if that fails."""
        if address := self._config.addresses.status:
            self._server = StatusServer(address, self._answer)
            if not is_loopback(address):
                _log.warning("the status at %s is shown to whoever reaches that address", address)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._heartbeats.close()
        if self._server is not None:
            self._server.close()
        if self._has_written:
            with contextlib.suppress(OSError):
                for path in (self._path, self._path.with_suffix(".half")):
                    path.unlink(missing_ok=True)
                self._path.parent.rmdir()  # with the report of the last process

    def _answer(self) -> tuple[bool, dict[str, Any]]:
        content = self.make(time.monotonic())
        return content["healthy"], content

    def make(self, now_seconds: float) -> dict[str, Any]:
        """Reads the counts and metrics of the role, and returns the report as of now. Callable from any thread."""
        with self._making:
            return self._made(now_seconds)

    def _made(self, now_seconds: float) -> dict[str, Any]:
        described = {"counts": {}, "metrics": {}, "peers": {}, "errors": [], **self.describe()}
        for name, number in described.pop("counts").items():
            before = self._counts.get(name)
            if before is None or number != before.number:
                self._counts[name] = Count(number, now_seconds, before is not None)
                self._logged.setdefault(name, number)
        idle_seconds = self._stop.idle_seconds
        healthy = idle_seconds < (STARTING_SECONDS if now_seconds - self._started < STARTING_SECONDS else STUCK_SECONDS)
        ages = {name: now_seconds - count.changed_seconds for name, count in self._counts.items()}
        problems = [] if healthy else [f"no progress for {_seconds(idle_seconds)}"]
        problems += [*_problems(described), *_stalls(self._counts, ages), *described["errors"]]
        content = {
            "role": self._role,
            "name": self._name,
            "run": self._config.directory,
            "pid": os.getpid(),
            "healthy": healthy,
            "uptime_seconds": now_seconds - self._started,
            "progress_age_seconds": idle_seconds,
            "versions": _versions(),
            "memory_bytes": resident_memory_bytes(),
            "file_descriptors": _entries("/proc/self/fd"),
            "threads": _entries("/proc/self/task"),
            **described,
            "progress": {
                name: {"count": count.number, "age_seconds": ages[name]} for name, count in self._counts.items()
            },
            "records": [*_records(self._role, described, self._counts, ages)],
            "problems": problems,
            "warnings": self._warnings(now_seconds, described["metrics"]),
        }
        return _plain(content)

    def _warnings(self, now_seconds: float, metrics: Mapping[str, float]) -> Sequence[str]:
        values = self._values  # not each is written every time
        for tag, value in metrics.items():
            if math.isfinite(value) and not tag.startswith(SHOWN):
                values[tag] = float(value)
        if "batches" in self._counts:  # the replay server's: each batch becomes an update
            per_second = values.get("replay/samples_per_second", 0.0) / self._config.learner.batch_size
            values |= {"learner/updates": self._counts["batches"].number, "charts/updates_per_second": per_second}
        learns = all(self._counts[name].has_changed for name in self._counts.keys() & {"updates", "batches"})
        return self._diagnosis.warnings(now_seconds, values, learns, silent_seconds=0.0)

    def _run(self) -> None:
        while not self._closing.wait(REPORT_SECONDS):
            now = time.monotonic()
            content = self.make(now)
            if content["healthy"]:
                self._heartbeats.send(now)
            if self._stop.has_begun:  # a start that is refused writes nothing
                self._write(json.dumps(content).encode(), content["healthy"])
            if now >= self._next_line:
                self._next_line = now + LINE_SECONDS
                self._log_line()

    def _write(self, content: bytes, healthy: bool) -> None:
        half, self._has_written = self._path.with_suffix(".half"), True
        try:
            self._path.parent.mkdir(exist_ok=True)
            with open(open_regular(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(content)
            os.replace(half, self._path)
        except OSError:  # no room: an empty report shows that this process lives, unless it hangs
            if healthy:
                with contextlib.suppress(OSError):
                    os.close(open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
                    os.utime(self._path)

    def _log_line(self) -> None:
        # A local run shows the progress of all its roles in one table.
        is_shown = bool(os.environ.get(SUPERVISED)) or self._role == "local" or self._config.processes == "one"
        numbers = {name: count.number for name, count in self._counts.items()}
        grown = {name: number - self._logged[name] for name, number in numbers.items()}
        self._logged = numbers
        text = ", ".join(f"{number:,} {name} ({grown[name]:+,})" for name, number in numbers.items())
        if text and not is_shown:
            _log.info("progress in a minute: %s", text)


def _records(
    role: str, described: Mapping[str, Any], counts: Mapping[str, Count], ages: Mapping[str, float]
) -> Iterator[Record]:
    """Yields what the process does and how fast, what it has done, and how old what it uses or has saved is."""
    metrics, missing = described["metrics"], _missing(described["peers"])
    tag, unit, works, waits = ACTIVITIES.get(role, ("", "", "", ""))
    if missing and not metrics.get(tag):
        waits = f"waits for {', '.join(missing)}"
    yield Record("does", described.get("does") or (works if metrics.get(tag) else waits))
    if (speed := metrics.get(tag, described.get("steps_per_second"))) is not None:
        yield Record("speed", f"{speed:,.1f}", unit or "steps/s")
    for name, count in counts.items():
        yield Record(name, f"{count.number:,}", "", f"{_seconds(ages[name])} ago")
    saved = {
        "weights": described.get("weights_age_seconds"),
        "copy": metrics.get("storage/copy_age_seconds"),  # on object storage
        "checkpoint": (described.get("checkpoint") or {}).get("age_seconds"),
    }
    for name, age in saved.items():
        if age is not None and math.isfinite(age):
            yield Record(name, _seconds(age), "old")


def _problems(described: Mapping[str, Any]) -> Iterator[str]:
    peers = described["peers"]
    yield from (f"is not connected to {name}" for name in _missing(peers))
    yield from (f"has no {name}" for name in ("learner", "actors") if name in peers and not peers[name])
    for name, reason in described.get("unreadable_keys", {}).items():
        yield f"keys of {name} cannot be read: {reason}"


def _stalls(counts: Mapping[str, Count], ages: Mapping[str, float]) -> Iterator[str]:
    """Yields the counts that no longer grow; before any has grown, the process may still start."""
    steady = [name for name in STEADY if name in counts]
    grown = [name for name in steady if counts[name].has_changed]
    yield from (f"no {name} for {_seconds(ages[name])}" for name in grown if ages[name] > STUCK_SECONDS)
    if steady and not grown and (age := max(ages[name] for name in steady)) > STARTING_SECONDS:
        yield f"no {' or '.join(steady)} since its start, {_seconds(age)} ago"


def _missing(peers: Mapping[str, Any]) -> list[str]:
    """Returns the servers that the process has not joined, with the state of each connection."""
    return [f"{name} ({state})" for name, state in peers.items() if isinstance(state, str) and state != "joined"]


def _entries(folder: str) -> int | None:
    try:
        return len(os.listdir(folder))
    except OSError:  # no file descriptor is left
        return None


def _seconds(value: float) -> str:
    return f"{value:,.0f} s"


@cache
def _versions() -> dict[str, Any]:
    packages = {name: version(name) for name in ("jax", "pyzmq", "envpool")}
    return {"apex_jax": commit(), "protocol": PROTOCOL_VERSION, **packages}


def _plain(value: Any) -> Any:
    """Returns the value for JSON: NumPy numbers become Python numbers, NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Heartbeats:
    """Heartbeats for systemd, which restarts a process without them; none if it does not watch this process.

    The unit's own `WatchdogSec=` must cover the time until the first heartbeat, with imports from a cold disk. After
    it, RESTART_SECONDS applies.
    """

    def __init__(self) -> None:
        is_watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._address = os.environ.get("NOTIFY_SOCKET", "") if is_watched else ""
        self._limit = os.environ.get("WATCHDOG_USEC", "")  # of the unit, in microseconds
        self._next = 0.0  # monotonic seconds; 0: none was sent

    def send(self, now_seconds: float) -> None:
        """Sends one, if it is due."""
        if self._address and self._limit and now_seconds >= self._next:
            shortened = "" if self._next else f"WATCHDOG_USEC={RESTART_SECONDS * 1e6:.0f}\n"
            self._notify(f"{shortened}WATCHDOG=1")
            self._next = now_seconds + HEARTBEAT_SECONDS

    def close(self) -> None:
        """Restores the unit's limit, so that the process has as long to end as it had to start."""
        if self._next:
            self._notify(f"WATCHDOG_USEC={self._limit}\nWATCHDOG=1")

    def _notify(self, message: str) -> None:
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address  # an abstract socket
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(message.encode(), address)
