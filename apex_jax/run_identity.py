"""Which run a directory belongs to: a random name, made once, in the file `run_identity` of the run directory.

The learner that begins a run makes it, and sends it with the weights and to the replay server; whatever process joins
them from a directory without one writes it down. Checkpoints and the replay's journal hold it, too, so that a copied
run is still that run. A process whose directory belongs to another run is refused: it would write its results into it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
from pathlib import Path

from apex_jax.disk import write_durably
from apex_jax.errors import RunError, printable, shown

_log = logging.getLogger(__name__)

FILE_NAME = "run_identity"  # in the run directory
_NAME = re.compile("[0-9a-f]{16}")
MAX_FILE_BYTES = 64


class RunIdentity:
    """The identity of the run that a process is part of, as far as it knows it; for any thread."""

    def __init__(self, directory: str | None = None) -> None:
        """Reads what the run directory says; None = it is kept nowhere. RunError if its file is damaged."""
        self._directory = directory
        self._lock = threading.Lock()
        self.name = self._read()  # 16 hexadecimal digits; empty = not known yet

    def differs(self, name: str) -> bool:
        """Tells whether a peer is of another run; one that does not know its own, or speaks nonsense, is not."""
        return is_identity(name) and self.name not in ("", name)

    def adopt(self, name: str, source: str) -> None:
        """Makes this process and its directory part of a run, unless the name is empty.

        RunError where they are of another one. `source`: where the name comes from, for that message.
        """
        with self._lock:
            if not is_identity(name) or name == self.name:
                return
            self.name = self.name or self._read()  # another process of this directory may have joined meanwhile
            if self.name not in ("", name):
                raise RunError(self.refusal(name, source))
            if not self.name:
                self.name = name
                self._write()

    def refusal(self, name: str, source: str, this: str = "this process") -> str:
        """Returns why a peer of the run `name` is not joined, and what to do."""
        return (
            f"{source} is of run {name}, {this} of run {self.name} (run_directory={self._directory}); give one of them"
            " the run_directory of the other's run or a new one, or the address of its own run"
        )

    def refused(self, reason: str) -> str:
        """Returns a peer's refusal in printable text; one that names this run with the directory here."""
        place = f"; here run_directory={self._directory}" if self.name and self.name in reason else ""
        return printable(reason) + place

    def _write(self) -> None:
        if self._directory is None:
            return
        path = Path(self._directory, FILE_NAME)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError, FileExistsError):  # another process is writing the same
                write_durably(path, self.name)
        except OSError as error:
            _log.warning("%s cannot be written (%s): the run goes on without it", path, error.strerror)

    def _read(self) -> str:
        if self._directory is None:
            return ""
        path = Path(self._directory, FILE_NAME)
        try:
            if not path.exists():
                return ""
            if not path.is_file():
                raise RunError(f"{path} is no file; move it away")
            with open(path, errors="replace") as file:
                name = file.read(MAX_FILE_BYTES).strip()
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}; make it readable") from None
        if name and not is_identity(name):
            what = f"holds {shown(name)}, must hold the run's 16 hexadecimal digits"
            raise RunError(f"{path} {what}; remove it, so that it is written anew")
        return name


def new_identity() -> str:
    """Returns the identity of a run that begins."""
    return secrets.token_hex(8)


def is_identity(name: str) -> bool:
    """Tells whether a text, such as a peer's, is the identity of a run."""
    return _NAME.fullmatch(name) is not None
