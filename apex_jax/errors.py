"""The errors a user sees: one line each, never a traceback."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class UsageError(ValueError):
    """What the user asked for cannot be done: the value, the range and the fix."""

    exit_code = 2


class RunError(RuntimeError):
    """What ended the run: what happened, where, and what to do."""

    exit_code = 1
    prefix = "error: "  # of the line that the user sees


class FatalError(RunError):
    """A restart would fail in the same way: the local supervisor knows it by its exit code, and does not try."""

    exit_code = 3
    prefix = "fatal: "


class DivergenceError(FatalError):
    """The loss or the network is no longer finite."""


class _GivenOnce(argparse.Action):
    """Stores the value of an option, and refuses a second one: nobody knows which was meant."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given = namespace.__dict__.setdefault("given", {})  # by option
        if option is not None and self.dest in given:
            parser.error(f"{option} is given twice, as {shown(given[self.dest])} and {shown(values)}; keep one")
        given[self.dest] = values
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would write and exit, and for an option that is given twice.

    `prog`: what the user types, "python main.py plot".
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("action", None, _GivenOnce)  # in place of "store"

    def error(self, message: str) -> NoReturn:
        """Refuses a command line."""
        command = self.prog.removeprefix("python main.py").strip()
        raise UsageError(f"{command}: {message}; see {self.prog} --help" if command else f"{message}; see --help")


def first_line(error: Exception) -> str:
    """Returns what an error of a library says, on one line; its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def printable(text: str) -> str:
    """Returns a text, such as a peer's, on one line and without anything that a terminal would obey."""
    return text if text.isprintable() else repr(text)


def shown(value: Any) -> str:
    """Returns a value as the user may have written it, on one line and short."""
    try:
        text = "" if value is None else str(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = "(a number of thousands of digits)"
    text = printable(text.lower() if isinstance(value, bool) else text)
    return text if len(text) <= 80 else f"{text[:77]}..."
