"""The errors a user sees: one line each, never a traceback."""

from __future__ import annotations

import re
from typing import Any

CREDENTIALS = re.compile("(?<=://)[^/:@]*+(:.*)?@")  # of a URL: KEY:SECRET@, or USER@; a secret may contain slashes
MOST_OF_A_LINE = 1_000  # characters of the message of an exception, which may quote a file


class _Printable(Exception):
    """An exception whose message has no control characters but new lines, even if it quotes files or peers."""

    def __str__(self) -> str:
        return "\n".join(map(printable, super().__str__().split("\n")))


class UsageError(_Printable, ValueError):
    """A mistake of the user; the message has the value, the range and the fix."""

    exit_code = 2
    prefix = "error: "  # of the line that the user sees


class RunError(_Printable, RuntimeError):
    """An error that ends the run; the message has the cause, the place and the fix."""

    exit_code = 1
    prefix = "error: "


class FatalError(RunError):
    """An error that a restart would repeat; on its exit code, the local supervisor does not restart the role."""

    exit_code = 3
    prefix = "fatal: "


class DivergenceError(FatalError):
    """The loss or the network is no longer finite."""


def first_line(error: Exception) -> str:
    """Returns the first line of an exception's message, printable and cut, or its class name if there is none."""
    line = printable((str(error).strip().splitlines() or [type(error).__name__])[0])
    return line if len(line) <= MOST_OF_A_LINE else f"{line[:MOST_OF_A_LINE]}..."


def printable(text: str) -> str:
    """Returns a text, such as a peer's, on one line and without control characters."""
    return text if text.isprintable() else repr(text)


def short_repr(value: Any) -> str:
    """Returns a value as the user writes it, on one line of at most 80 characters, without the credentials of a URL."""
    try:
        text = "" if value is None else str(value)
    except ValueError:  # Python does not convert integers of more than 4,300 digits
        text = "(a number of thousands of digits)"
    text = CREDENTIALS.sub("***@", printable(text.lower() if isinstance(value, bool) else text))
    return text if len(text) <= 80 else f"{text[:77]}..."
