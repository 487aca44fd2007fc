"""A log whose number of lines does not grow with what peers do."""

from __future__ import annotations

import logging

LINES_AT_ONCE = 1024  # as many as there can be actors: a fleet that starts has a line for each of them
INTERVAL_SECONDS = 60.0


class LimitedLog:
    """Writes at most LINES_AT_ONCE lines in INTERVAL_SECONDS; then the number of those left out."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lines = 0
        self._next_seconds = 0.0

    def info(self, message: str, *arguments: object) -> None:
        """Logs a line, if there is room for it."""
        self._write(logging.INFO, message, *arguments)

    def warning(self, message: str, *arguments: object) -> None:
        """Logs a warning, if there is room for it."""
        self._write(logging.WARNING, message, *arguments)

    def tick(self, now_seconds: float) -> None:
        """Begins another interval when the one before is over."""
        if now_seconds < self._next_seconds:
            return
        if (left_out := self._lines - LINES_AT_ONCE) > 0:
            self._log.warning("%d more lines about actors that join and leave were left out", left_out)
        self._lines, self._next_seconds = 0, now_seconds + INTERVAL_SECONDS

    def _write(self, level: int, message: str, *arguments: object) -> None:
        self._lines += 1
        if self._lines <= LINES_AT_ONCE:
            self._log.log(level, message, *arguments)
