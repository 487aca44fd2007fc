"""The argument parser of every command."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from apex_jax.host.errors import UsageError, short_repr
from apex_jax.host.program import NAME


class _GivenOnce(argparse.Action):
    """Stores the value of an option; rejects a second value, because the user may mean either."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given = namespace.__dict__.setdefault("given", {})  # by option
        if option is not None and self.dest in given:
            parser.error(
                f"{option} is given twice, as {short_repr(given[self.dest])} and {short_repr(values)}; keep one"
            )
        given[self.dest] = values
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of exiting, and for an option that is given twice. `command`: such as "plot"."""

    def __init__(self, command: str = "", **options: Any) -> None:
        super().__init__(**{"prog": f"{NAME} {command}".strip(), **options})  # a subparser gets its own prog
        self.register("action", None, _GivenOnce)  # replaces "store"

    def error(self, message: str) -> NoReturn:
        """Raises UsageError for an invalid command line."""
        command = self.prog.removeprefix(NAME).strip()
        raise UsageError(f"{command}: {message}; see {self.prog} --help" if command else f"{message}; see --help")
