"""How this program was started: `python main.py` in a checkout, or `apex-jax` if the package is installed."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

from apex_jax.host.errors import UsageError

_PACKAGE = Path(__file__).resolve().parents[1]
_IS_CHECKOUT = (_PACKAGE.parent / "main.py").is_file() and (_PACKAGE.parent / "pyproject.toml").is_file()

CHECKOUT = _PACKAGE.parent if _IS_CHECKOUT else None  # None: the package is installed without its repository
CONFIGS = _PACKAGE.parent / "configs" if _IS_CHECKOUT else _PACKAGE / "configs"
NAME = "python main.py" if _IS_CHECKOUT and Path(sys.argv[0]).name != "apex-jax" else "apex-jax"  # what the user types


def command() -> list[str]:
    """Returns the command line that starts this program again, without arguments.

    -P keeps the working directory off Python's path, so that no file in it can replace a package.
    """
    if CHECKOUT is not None:
        return [sys.executable, str(CHECKOUT / "main.py")]
    return [sys.executable, "-P", "-m", "apex_jax"]


def installing(extra: str) -> str:
    """Returns the command that installs what an extra of the package has, such as "video"."""
    return f"pip install -r requirements-{extra}.txt" if CHECKOUT else f"pip install 'apex-jax[{extra}]'"


def shell_command(python: str) -> str:
    """Returns what to type in the working directory to start this program with the interpreter `python`."""
    if NAME != "python main.py":
        return NAME
    main = os.path.relpath(_PACKAGE.parent / "main.py")
    return f"{python} {shlex.quote(os.path.abspath(main) if main.startswith(os.pardir) else main)}"


# The argument parser of every command -------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of exiting; takes options by their whole names only. `command`: such as "plot"."""

    def __init__(self, command: str = "", **options: Any) -> None:
        # A subparser gets its own prog.
        super().__init__(**{"prog": f"{NAME} {command}".strip(), "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raises UsageError for an invalid command line."""
        command = self.prog.removeprefix(NAME).strip()
        raise UsageError(f"{command}: {message}; see {self.prog} --help" if command else f"{message}; see --help")
