"""The errors a user sees: one line each, never a traceback."""

from __future__ import annotations

from typing import Any


class UsageError(ValueError):
    """What the user asked for cannot be done: the value, the range and the fix. Exit code 2."""


class RunError(RuntimeError):
    """What ended the run: what happened, where, and what to do. Exit code 1."""

    prefix = "error: "  # of the line that the user sees


class FatalError(RunError):
    """Another start would end as this one did, so a supervisor does not try."""

    prefix = "fatal: "


class DivergenceError(FatalError):
    """Learning has come to nothing."""


def shown(value: Any) -> str:
    """Returns a value as the user may have written it, on one line and short."""
    try:
        text = "" if value is None else str(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = "(a number of thousands of digits)"
    text = text.lower() if isinstance(value, bool) else text
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 80 else f"{text[:77]}..."
