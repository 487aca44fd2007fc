"""Standard output of a run whose disk is full or whose reader has ended; tables of text."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

CLOSED_PIPE = 141  # exit code of a program that the signal SIGPIPE ends


class Output(io.TextIOWrapper):
    """A standard stream that drops text while writing fails; a closed pipe as standard output ends the program."""

    error = ""  # of a write that has failed

    def write(self, text: str) -> int:
        """Writes `text` if possible; returns its length in either case."""
        try:
            super().write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream if possible."""
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def discard(self) -> None:
        """Redirects the stream to the null device, which accepts the pending text and all later text."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())

    def _lose(self, error: OSError) -> None:
        self.error = str(error.strerror)
        if isinstance(error, BrokenPipeError):
            self.discard()
            if self is sys.stdout:
                raise SystemExit(CLOSED_PIPE)


def outlast_full_disk() -> None:
    """Replaces standard output and error by an `Output` each, which escapes characters that its encoding lacks."""
    for name in ("stdout", "stderr"):
        if stream := getattr(sys, name):  # None if it was closed before the start
            binary = open(stream.fileno(), "wb", closefd=False)  # noqa: SIM115
            setattr(sys, name, Output(binary, stream.encoding, "backslashreplace", line_buffering=True))


def printed(exit_code: int) -> int:
    """Returns the exit code of a command whose result is its output: 1 instead of 0 if some of that was lost."""
    if exit_code or not isinstance(sys.stdout, Output) or not sys.stdout.error:
        return exit_code
    print(f"error: standard output: {sys.stdout.error}; make room, or write elsewhere", file=sys.stderr)
    sys.stdout.discard()  # Python would report pending text at exit
    return 1


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the rows of a table as lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
