"""Standard output and error that may go away, such as a pipe to `head` or a log on a full disk: no run ends by that."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from typing import TextIO

_log = logging.getLogger(__name__)

PASSING = (errno.ENOSPC, errno.EDQUOT)  # a disk may have room again


class Output(io.TextIOBase):
    """A standard stream that swallows text while it cannot be written."""

    def __init__(self, stream: TextIO):
        """`stream`: with a file descriptor."""
        self.error: OSError | None = None  # the first one
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Returns the length of `text`, written or not."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Hands everything to the system, if it takes it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def isatty(self) -> bool:
        """Tells whether a person may be looking."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Returns the stream's file descriptor."""
        return self._stream.fileno()

    def end(self) -> None:
        """Flushes for the last time: text that is still pending is dropped, and not reported as Python exits."""
        self.flush()
        if self.error is not None:
            self._discard()

    def _lose(self, error: OSError) -> None:
        if error.errno not in PASSING:
            self._discard()
        if self.error is None:
            self.error = error
            if self is sys.stdout:
                _log.info("standard output cannot be written (%s): the run goes on without", error.strerror)

    def _discard(self) -> None:
        """Points the stream at the null device, which takes what is pending and all that follows."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        self._stream.flush()


def outlast_lost_output() -> None:
    """Makes standard output and error such that losing them ends nothing. Call it first, before files are opened.

    A stream that was closed before the start is the null device from here on: otherwise the next file to be opened
    would take its number, and receive text that is meant for a person.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    for stream in (sys.stdout, sys.stderr):  # a name that a terminal's encoding lacks is no reason to fail
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115 - all three as long as the process
    sys.stdout = Output(sys.stdout or open(1, "w"))  # noqa: SIM115
    sys.stderr = Output(sys.stderr or open(2, "w"))  # noqa: SIM115


def end_output(exit_code: int) -> int:
    """Flushes standard output and error; returns the exit code of a command whose result is what it printed.

    That is 1 if a disk was full. A reader that has left, such as `head`, had what it wanted.
    """
    outputs = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, Output)]
    for output in outputs:
        output.end()
    lost = next((output.error for output in outputs[:1]), None)
    if exit_code == 0 and lost is not None and lost.errno in PASSING:
        print(f"error: standard output: {lost.strerror}; make room, or write elsewhere", file=sys.stderr, flush=True)
        return 1
    return exit_code
