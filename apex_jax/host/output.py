"""Tables of text; keeps a run alive if standard output or error fails, such as a pipe to `head` or a full disk."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Sequence

_log = logging.getLogger(__name__)

PASSING = (errno.ENOSPC, errno.EDQUOT)  # a full disk may have room again later


class Output(io.TextIOWrapper):
    """A standard stream that drops text while writing fails, and escapes characters that its encoding lacks."""

    error: OSError | None = None  # the first error of a write

    def write(self, text: str) -> int:
        """Writes `text` if possible; returns its length in either case."""
        try:
            return super().write(text)
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
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        super().flush()

    def _lose(self, error: OSError) -> None:
        if error.errno not in PASSING:
            self.discard()
        if self.error is None:
            self.error = error
            if self is sys.stdout:
                _log.info("standard output cannot be written (%s): the run goes on without", error.strerror)


def outlast_lost_output() -> None:
    """Replaces standard output and error by an `Output` each. Call it before opening any file.

    A stream that was closed before the start becomes the null device: otherwise the next file to be opened would get
    the stream's descriptor number, and receive the text written to the stream.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115 - it stays open until the process ends
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        encoding = getattr(getattr(sys, name), "encoding", None)
        binary = open(descriptor, "wb", closefd=False)  # noqa: SIM115
        setattr(sys, name, Output(binary, encoding, "backslashreplace", line_buffering=True))


def end_output(exit_code: int) -> int:
    """Flushes standard output and error; returns the exit code of a command whose result is its output.

    A full disk turns 0 into 1. A closed pipe does not: a reader such as `head` needs no more output.
    """
    for output in (sys.stdout, sys.stderr):
        output.flush()
        if isinstance(output, Output) and output.error is not None:
            output.discard()  # Python would report pending text at exit
    error = getattr(sys.stdout, "error", None)
    if exit_code == 0 and error is not None and error.errno in PASSING:
        print(f"error: standard output: {error.strerror}; make room, or write elsewhere", file=sys.stderr, flush=True)
        return 1
    return exit_code


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the rows of a table as lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
