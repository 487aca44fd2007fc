"""Keeps a run alive if standard output or error fails, such as a pipe to `head` or a log on a full disk."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from typing import TextIO

_log = logging.getLogger(__name__)

PASSING = (errno.ENOSPC, errno.EDQUOT)  # a full disk may have room again later


class Output(io.TextIOBase):
    """A standard stream that drops text while writing fails."""

    def __init__(self, stream: TextIO):
        """`stream`: must have a file descriptor."""
        self.error: OSError | None = None  # the first one
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Writes `text` if possible; returns its length in either case."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream if possible."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def isatty(self) -> bool:
        """Returns whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Returns the stream's file descriptor."""
        return self._stream.fileno()

    def end(self) -> None:
        """Flushes for the last time; after an error, discards pending text, which Python would report at exit."""
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
        """Redirects the stream to the null device, which accepts the pending text and all later text."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        self._stream.flush()


def outlast_lost_output() -> None:
    """Wraps standard output and error so that their errors do not end the process. Call it before opening any file.

    A stream that was closed before the start becomes the null device: otherwise the next file to be opened would get
    the stream's descriptor number, and receive the text written to the stream.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    for stream in (sys.stdout, sys.stderr):  # escapes characters that the encoding lacks, instead of raising an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115 - all three stay open until the process ends
    sys.stdout = Output(sys.stdout or open(1, "w"))  # noqa: SIM115
    sys.stderr = Output(sys.stderr or open(2, "w"))  # noqa: SIM115


def end_output(exit_code: int) -> int:
    """Flushes standard output and error; returns the exit code of a command whose result is its output.

    A full disk turns 0 into 1. A closed pipe does not: a reader such as `head` needs no more output.
    """
    outputs = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, Output)]
    for output in outputs:
        output.end()
    lost = next((output.error for output in outputs[:1]), None)
    if exit_code == 0 and lost is not None and lost.errno in PASSING:
        print(f"error: standard output: {lost.strerror}; make room, or write elsewhere", file=sys.stderr, flush=True)
        return 1
    return exit_code
