"""Finds roles that are alive but make no progress: stopped, swapped out, or blocked."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from apex_jax.operations.status_page import STARTING_SECONDS, STUCK_SECONDS
from apex_jax.run.metric_files import is_number
from apex_jax.transport.status_link import StatusError, fetch

POLL_SECONDS = 5.0
ANSWER_SECONDS = 4.0


class RoleWatch:
    """Requests the status of each role periodically, in a thread.

    Polls instead of receiving heartbeats, as systemd does, because the supervisor also serves the newest report of each
    role, even if the role hangs.

    Time without an answer counts only while this process itself runs, so a suspended machine or a stopped supervisor
    does not make the roles look silent.
    """

    def __init__(self, addresses: Mapping[str, str]):
        """`addresses`: by name of the role; a role without an address is not watched."""
        self.reports: dict[str, dict[str, Any]] = {}  # newest report of each role that has answered
        self._addresses = {name: address for name, address in addresses.items() if address}
        self._started = dict.fromkeys(self._addresses, 0.0)  # start time by role, 0 = not running
        self._silent_seconds = dict.fromkeys(self._addresses, 0.0)
        self._unhealthy: dict[str, float] = {}  # seconds without progress, as the role reports
        self._answered: set[str] = set()  # roles that have answered since their start
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def address_of(self, name: str) -> str:
        """Returns the status address of a role; empty if it has none."""
        return self._addresses.get(name, "")

    def started(self, name: str) -> None:
        """Starts watching a role that has just been started or restarted."""
        if name in self._addresses:
            self._silent_seconds[name] = 0.0
            self._answered.discard(name)
            self._unhealthy.pop(name, None)
            self._started[name] = time.monotonic()

    def ended(self, name: str) -> None:
        """Stops watching a role that does not run."""
        if name in self._addresses:
            self._started[name] = 0.0
            self.reports.pop(name, None)

    def fault(self, name: str) -> tuple[str, float]:
        """Returns the fault of a running role and its duration in seconds; ("", 0.0) if there is none."""
        if not self._started.get(name):
            return "", 0.0
        if idle := self._unhealthy.get(name):
            return f"has made no progress for {idle:.0f} s", idle
        limit = STUCK_SECONDS if name in self._answered else STARTING_SECONDS  # imports take long on a busy machine
        silent = self._silent_seconds[name]
        return (f"has not answered for {silent:.0f} s", silent) if silent > limit else ("", 0.0)

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        asked = dict.fromkeys(self._addresses, time.monotonic())
        while not self._closing.wait(POLL_SECONDS):
            for name in self._addresses:
                since = self._started[name]
                if since and not self._closing.is_set():
                    now = time.monotonic()
                    passed, asked[name] = min(now - max(asked[name], since), 2 * POLL_SECONDS), now
                    self._ask(name, passed, since)

    def _ask(self, name: str, passed_seconds: float, since: float) -> None:
        try:
            healthy, report = fetch(self._addresses[name], ANSWER_SECONDS)
        except StatusError:
            if self._started[name] == since:  # otherwise the role has been restarted meanwhile
                self._silent_seconds[name] += passed_seconds
            return
        if self._started[name] == since:
            self._silent_seconds[name] = 0.0
            self._answered.add(name)
            self.reports[name] = report
            if not healthy:
                age = report.get("progress_age_seconds")
                self._unhealthy[name] = float(age) if is_number(age) and age else STUCK_SECONDS
