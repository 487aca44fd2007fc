"""A rate-limited log, so that peers cannot flood it."""

from __future__ import annotations

import logging

LINES_AT_ONCE = 1024  # = MAX_ACTORS, as the start of a fleet logs one line per actor
INTERVAL_SECONDS = 60.0


class LimitedLog:
    """Writes at most LINES_AT_ONCE lines per INTERVAL_SECONDS, then the number of suppressed lines."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lines = 0
        self._next_seconds = 0.0

    def info(self, message: str, *arguments: object) -> None:
        """Logs an info line, if the limit allows."""
        self._write(logging.INFO, message, *arguments)

    def warning(self, message: str, *arguments: object) -> None:
        """Logs a warning, if the limit allows."""
        self._write(logging.WARNING, message, *arguments)

    def tick(self, now_seconds: float) -> None:
        """Starts a new interval when the current one is over, and logs the number of suppressed lines."""
        if now_seconds < self._next_seconds:
            return
        if (left_out := self._lines - LINES_AT_ONCE) > 0:
            self._log.warning("%d more lines about actors that join and leave were left out", left_out)
        self._lines, self._next_seconds = 0, now_seconds + INTERVAL_SECONDS

    def _write(self, level: int, message: str, *arguments: object) -> None:
        self._lines += 1
        if self._lines <= LINES_AT_ONCE:
            self._log.log(level, message, *arguments)
