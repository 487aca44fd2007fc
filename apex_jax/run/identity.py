"""The identity of the run that a directory belongs to: a random name in its file `run_identity`, made once.

The learner that starts a run creates the name, and sends it with the weights and to the replay server; a process that
joins from a directory without a name stores it there. Checkpoints and the replay's journal hold the name too, so that a
copied run keeps it. A process whose directory belongs to another run is rejected: it would mix the results of two runs.

So is one with other values of the settings in a compatibility key: the text of `Config.compatibility_key`,
`Config.weights_compatibility_key` or `Config.checkpoint_compatibility_key`, `name=value` words separated by spaces.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
from pathlib import Path

from apex_jax.config.keys import compatibility_name
from apex_jax.config.load import SETTINGS
from apex_jax.host.disk import read_regular, write_durably
from apex_jax.host.errors import RunError, printable, short_repr

_log = logging.getLogger(__name__)

FILE_NAME = "run_identity"  # in the run directory
_NAME = re.compile("[0-9a-f]{16}")
MAX_FILE_BYTES = 64


class RunIdentity:
    """The identity of the run that a process is part of, once the process knows it. Thread-safe."""

    def __init__(self, directory: str | None = None) -> None:
        """Reads the file of the run directory; None = nothing is stored. Raises RunError if the file cannot be used."""
        self._directory = directory
        self._lock = threading.Lock()
        self.name = self._read()  # 16 hexadecimal digits; empty = not known yet

    def adopt(self, name: str, source: str) -> None:
        """Makes this process and its directory part of the run `name`; ignores a name that is not an identity.

        Raises RunError if they belong to another run. `source`: origin of the name, for that message.
        """
        with self._lock:
            if not is_identity(name) or name == self.name:
                return
            self.name = self.name or self._read()  # another process may have written the file meanwhile
            if self.name not in ("", name):
                raise RunError(self.refusal(name, source))
            if not self.name:
                self.name = name
                self._write()

    def refusal(self, name: str, source: str, this: str = "this process") -> str:
        """Returns the message for a peer of another run, `name`: why it is rejected, and what to do."""
        return (
            f"{source} is of run {name}, {this} of run {self.name} (run_directory={self._directory}); give one of them"
            " the run_directory of the other's run or a new one, or the address of its own run"
        )

    def _write(self) -> None:
        if self._directory is None:
            return
        path = Path(self._directory, FILE_NAME)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError, FileExistsError):  # another process is writing the same name
                write_durably(path, self.name)
        except OSError as error:
            _log.warning("%s cannot be written (%s): the run goes on without it", path, error.strerror)

    def _read(self) -> str:
        if self._directory is None:
            return ""
        path = Path(self._directory, FILE_NAME)
        try:
            name = read_regular(path, MAX_FILE_BYTES).decode(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            raise RunError(f"{path} cannot be read ({error.strerror}); move it away") from None
        if name and not is_identity(name):
            what = f"holds {short_repr(name)}, must hold the run's 16 hexadecimal digits"
            raise RunError(f"{path} {what}; remove it, so that it is written anew")
        return name


def new_identity() -> str:
    """Returns the identity of a new run."""
    return secrets.token_hex(8)


def is_identity(name: str) -> bool:
    """Returns whether a text, such as a peer's, has the form of an identity."""
    return _NAME.fullmatch(name) is not None


# Compatibility keys of processes, checkpoints and journals, and their differences -------------------------------------


KEYS = tuple(name for name, setting in SETTINGS.items() if setting.key.scope)
"""A checkpoint is rejected if one of these differs; processes compare those of their scope, see `Key`."""
MAX_CHARACTERS = 2_500  # enough for two compatibility keys; their UTF-8 always fits in a `Refusal`


def differences(before: str, now: str) -> dict[str, tuple[str, str]]:
    """Returns the values (before, now) of each key of KEYS that differs between two compatibility keys.

    A key that only one of them has is ignored: earlier releases have fewer keys.
    """
    ours, theirs = _values(now), _values(before)
    found = {}
    for key in KEYS:
        name = compatibility_name(key)
        if name in ours and name in theirs and ours[name] != theirs[name]:
            found[key] = (theirs[name], ours[name])
    return found


def describe_differences(before: str, now: str, was: str = "was", is_now: str = "now") -> str:
    """Returns the keys that differ: `environment.task: was Pong-v5, now Boxing-v5; ...`.

    Returns both whole texts if none of KEYS differs. A text may come from a peer, so both are made printable, which
    can make them four times as long; the result is therefore cut after MAX_CHARACTERS characters.
    """
    found = differences(before, now).items()
    keys = (f"{key}: {was} {printable(old)}, {is_now} {printable(new)}" for key, (old, new) in found)
    text = "; ".join(keys) or f"{was} [{printable(before)}], {is_now} [{printable(now)}]"
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


def _values(text: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in text.split(" "))
    return {name: value for name, _, value in pairs}
