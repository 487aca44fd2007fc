"""What a process reports, how others read it, and which roles a supervisor finds without progress."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from apex_jax.host.disk import read_regular
from apex_jax.host.errors import printable, short_repr
from apex_jax.run.metrics import is_number

FOLDER = "reports"  # of a run directory: NAME.json for each process that runs
REPORT_SECONDS = 1.0  # between two reports of a process
STUCK_SECONDS = 60.0  # a process whose loop has not iterated for this long is not healthy
STARTING_SECONDS = 300.0  # the limit for a process that is younger than this, because it may compile
LATE_SECONDS = 10.0  # without a report, after which a reader takes a process for stopped
MAX_REPORT_BYTES = 2**20
MAX_LINES = 6  # of the problems and of the warnings of a process
LINE_CHARACTERS = 400  # of an error or a warning


class Record(NamedTuple):
    """One thing that a report, the live view or a page shows."""

    name: str  # such as "updates"
    value: str  # such as "98,765"
    unit: str = ""  # or what else follows the value in one phrase
    detail: str = ""

    @property
    def text(self) -> str:
        """The record on one line, without its name."""
        return ", ".join(filter(None, (f"{self.value} {self.unit}".strip(), self.detail)))


class ProcessStatus(NamedTuple):
    """The report of a process, as its reader has it: a peer may have put anything into it."""

    name: str  # as given, or as the process reports it
    address: str
    content: dict[str, Any] | None
    error: str  # why there is no content

    @property
    def problems(self) -> list[str]:
        """What keeps the process from its work or from saving it, at most MAX_LINES lines."""
        return [self.error] if self.content is None else self._lines("problems")

    @property
    def warnings(self) -> list[str]:
        """What the process advises to change, at most MAX_LINES lines."""
        return self._lines("warnings")

    @property
    def records(self) -> list[Record]:
        """What the process does, how fast, how much it has done and how old what it saved is."""
        rows = (self.content or {}).get("records")
        rows = rows if isinstance(rows, list) else []
        return [Record(*map(short_repr, row)) for row in rows if isinstance(row, list) and len(row) == 4]

    @property
    def cells(self) -> tuple[str, str, str]:
        """The records in three columns: what the process does now, how fast, and the others."""
        if self.content is None:
            return "unreachable", "", ""
        texts = {record.name: record.text for record in self.records}
        does, speed = texts.pop("does", ""), texts.pop("speed", "")
        return does, speed, "; ".join(f"{name} {text}" for name, text in texts.items())

    @property
    def metrics(self) -> dict[str, float]:
        """The newest values of the process by tag."""
        return {tag: value for tag, value in _dict(self.content, "metrics").items() if is_number(value)}

    @property
    def frames(self) -> float:
        """The frames of the run, as the process knows them; 0 if it does not."""
        number = (self.content or {}).get("environment_frames")
        return number if is_number(number) else 0

    def with_roles(self) -> list[ProcessStatus]:
        """Returns this status, then those that a supervisor has of its processes."""
        reports = _dict(self.content, "reports")
        names = {name: f"{self.name}/{short_repr(name)}" for name in reports}
        return [self, *(ProcessStatus(names[name], self.address, _dict(reports, name), "") for name in reports)]

    def _lines(self, name: str) -> list[str]:
        lines = (self.content or {}).get(name)
        texts = [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
        return [printable(line)[:LINE_CHARACTERS] for line in texts[:MAX_LINES]]


def _dict(content: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    value = (content or {}).get(name)
    return value if isinstance(value, dict) else {}


def report_path(run_directory: str | Path, name: str) -> Path:
    """Returns the file of the report of a process."""
    return Path(run_directory, FOLDER, f"{name}.json")


def read_report(path: Path) -> dict[str, Any] | None:
    """Returns a report; None if the file holds none."""
    try:
        content = json.loads(read_regular(path, MAX_REPORT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def remove_reports(run_directory: str) -> None:
    """Removes the reports that killed processes have left; call it while no other process of the run goes on."""
    shutil.rmtree(Path(run_directory, FOLDER), ignore_errors=True)


def statuses_of_run(run_directory: str) -> Iterator[ProcessStatus]:
    """Yields the status of each process of a run directory that has not ended by itself."""
    is_empty = True
    for path in sorted(Path(run_directory, FOLDER).glob("*.json")):
        try:
            age_seconds = time.time() - path.lstat().st_mtime
        except OSError:  # the process has just ended
            continue
        name, place, is_empty = short_repr(path.stem), printable(str(path)), False
        if age_seconds > LATE_SECONDS:
            yield ProcessStatus(name, place, None, f"has not reported for {age_seconds:,.0f} s: stopped, or killed")
        elif (content := read_report(path)) is not None:  # a supervisor's roles have reports of their own
            yield ProcessStatus(name, place, {**content, "reports": {}}, "")
        else:
            yield ProcessStatus(name, place, None, "its report cannot be read: is the disk full?")
    if is_empty:
        yield ProcessStatus(run_directory, run_directory, None, f"no process runs: there is no report in {FOLDER}/")


# What a local run does with the reports of its roles: it finds those that live and do nothing -----------------------


@dataclass
class _Watched:
    """A role that runs."""

    written: int  # time of its file, nanoseconds
    silent_seconds: float = 0.0  # since its report was written
    has_reported: bool = False  # since its start


class RoleWatch:
    """Reads the reports that the roles of a local run write every second.

    Time without a report counts only while this process itself runs, so a suspended machine or a stopped supervisor
    does not make the roles look silent.
    """

    def __init__(self, run_directory: str, clock: Callable[[], float] = time.monotonic):
        self.reports: dict[str, dict[str, Any]] = {}  # newest report of each role that has reported
        self._directory, self._clock = run_directory, clock
        self._roles: dict[str, _Watched] = {}  # those that run
        self._looked = clock()

    def started(self, name: str) -> None:
        """Starts watching a role that has just been started or restarted."""
        self._roles[name] = _Watched(self._written(name))

    def ended(self, name: str) -> None:
        """Stops watching a role that does not run."""
        self._roles.pop(name, None)
        self.reports.pop(name, None)

    def look(self) -> None:
        """Reads the reports, at most once in REPORT_SECONDS."""
        passed = self._clock() - self._looked
        if passed < REPORT_SECONDS:
            return
        self._looked += passed
        try:
            os.utime(self._directory)
        except OSError:  # on a full or read-only disk a missing report is no sign of a hang
            return
        for name, role in self._roles.items():
            written = self._written(name)
            role.silent_seconds += min(passed, 2 * REPORT_SECONDS)
            if written not in (0, role.written):
                role.written, role.silent_seconds, role.has_reported = written, 0.0, True
                content = read_report(report_path(self._directory, name))  # None: the disk is full
                self.reports[name] = content or self.reports.get(name, {})

    def fault(self, name: str) -> tuple[str, float]:
        """Returns the fault of a running role and its duration in seconds; ("", 0.0) if there is none."""
        if (role := self._roles.get(name)) is None:
            return "", 0.0
        report = self.reports.get(name, {})
        if report.get("healthy") is False:
            age = report.get("progress_age_seconds")
            idle = float(age) if is_number(age) else STUCK_SECONDS
            return f"has made no progress for {idle:.0f} s", idle
        limit = STUCK_SECONDS if role.has_reported else STARTING_SECONDS  # imports take long on a busy machine
        silent = role.silent_seconds
        return (f"has not reported for {silent:.0f} s", silent) if silent > limit else ("", 0.0)

    def _written(self, name: str) -> int:
        with contextlib.suppress(OSError):
            return report_path(self._directory, name).stat().st_mtime_ns
        return 0
