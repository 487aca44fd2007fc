"""The argument parser of every command."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from apex_jax.host.errors import UsageError
from apex_jax.host.program import NAME


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of exiting; takes options by their whole names only. `command`: such as "plot"."""

    def __init__(self, command: str = "", **options: Any) -> None:
        # A subparser gets its own prog.
        super().__init__(**{"prog": f"{NAME} {command}".strip(), "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raises UsageError for an invalid command line."""
        command = self.prog.removeprefix(NAME).strip()
        raise UsageError(f"{command}: {message}; see {self.prog} --help" if command else f"{message}; see --help")
