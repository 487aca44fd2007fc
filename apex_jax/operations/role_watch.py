"""Finds roles that are alive but make no progress: stopped, swapped out, or blocked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apex_jax.operations.process_report import STARTING_SECONDS, STUCK_SECONDS
from apex_jax.operations.records import REPORT_SECONDS, read_report, report_path
from apex_jax.run.metric_files import is_number


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
