"""Finds roles that live and do nothing: stopped, swapped out, or waiting for what never comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from apex_jax.operations.status_page import STARTING_SECONDS, STUCK_SECONDS
from apex_jax.transport.status_link import StatusError, fetch

POLL_SECONDS = 5.0
ANSWER_SECONDS = 4.0


class Watch:
    """Asks each role again and again for its status, on a thread of its own.

    Silence is counted only as long as this process itself runs: neither a suspended machine nor a stopped supervisor
    makes the roles look silent.
    """

    def __init__(self, addresses: Mapping[str, str]):
        """`addresses`: by name of the role; of a role without one nothing is ever wrong."""
        self.reports: dict[str, dict[str, Any]] = {}  # newest of each role that has answered
        self._addresses = {name: address for name, address in addresses.items() if address}
        self._started = dict.fromkeys(self._addresses, 0.0)  # when, 0 = not running
        self._silent_seconds = dict.fromkeys(self._addresses, 0.0)
        self._unhealthy: dict[str, float] = {}  # seconds without progress, by the role's own word
        self._answered: set[str] = set()  # since they were started
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def address_of(self, name: str) -> str:
        """Returns where the role tells its status; empty for nowhere."""
        return self._addresses.get(name, "")

    def started(self, name: str) -> None:
        """Begins to watch a role that has just been started, or started again."""
        if name in self._addresses:
            self._silent_seconds[name] = 0.0
            self._answered.discard(name)
            self._unhealthy.pop(name, None)
            self._started[name] = time.monotonic()

    def ended(self, name: str) -> None:
        """Leaves a role alone that is known not to run."""
        if name in self._addresses:
            self._started[name] = 0.0
            self.reports.pop(name, None)

    def fault(self, name: str) -> tuple[str, float]:
        """Returns what is wrong with a role that runs, and for how many seconds by now; ("", 0.0) if nothing is."""
        if not self._started.get(name):
            return "", 0.0
        if idle := self._unhealthy.get(name):
            return f"has made no progress for {idle:.0f} s", idle
        limit = STUCK_SECONDS if name in self._answered else STARTING_SECONDS  # which imports take on a busy machine
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
            if self._started[name] == since:  # else it is another process by now
                self._silent_seconds[name] += passed_seconds
            return
        if self._started[name] == since:
            self._silent_seconds[name] = 0.0
            self._answered.add(name)
            self.reports[name] = report
            if not healthy:
                self._unhealthy[name] = float(report.get("progress_age_seconds") or STUCK_SECONDS)
