"""The head of a journal, the file `journal.json` of its folder: format, configuration, run, and the id of the replay.

It is on the disk before any log or snapshot is made. A start reads it first, and changes nothing if it does not fit.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from apex_jax.config import Config
from apex_jax.host.disk import open_regular, read_regular, write_durably
from apex_jax.host.errors import RunError
from apex_jax.run.identity import RunIdentity, describe_differences, differences, is_identity, new_identity
from apex_jax.types import SegmentSpec

FORMAT = 5
FILE_NAME = "journal.json"
MAX_BYTES = 2**20  # far more than a head takes


class JournalError(RunError):
    """The existing journal cannot be used; the message has the reason and the fix."""


class CorruptFile(ValueError):
    """Bytes that differ from what was written; the message names the difference."""


class Header:
    """The head of a journal. Thread-safe."""

    def __init__(self, directory: Path, compatibility_key: str, spec: SegmentSpec, run: str = "") -> None:
        """`compatibility_key`: see `Config`; `run`: see `apex_jax.run.identity`, empty = taken from the file."""
        self.run = run
        self.replay_id = new_identity()  # unless the file contains one
        self._path = directory / FILE_NAME
        self._lock = threading.Lock()
        self._written = ""  # the content of the file
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in spec._asdict().items()}
        if not spec.numbers:  # as in the journals of releases whose observations had one part
            del fields["numbers"]
        self._configuration = {"compatibility_key": compatibility_key, "segments": json.dumps(fields)}

    def write(self) -> None:
        """Writes the file unless it is there as it should be. Raises OSError."""
        with self._lock:
            text = json.dumps({"format": FORMAT, **self._configuration, "replay": self.replay_id, "run": self.run})
            if text != self._written:
                write_durably(self._path, text)
                self._written = text

    def read(self) -> None:
        """Takes run and id from the file, if the journal has begun. Raises JournalError if it cannot be used."""
        path, fix = self._path, f"another run_directory, or move {self._path.parent} away"
        try:
            facts = json.loads(read_regular(path, MAX_BYTES))
            version = str(facts["format"])
        except (FileNotFoundError, NotADirectoryError):
            if not any(path.parent.glob("s*-*")):
                return
            path, version = path.parent, f"{FORMAT - 1} or earlier"
        except OSError as error:
            raise unreadable(path, error) from None
        except (ValueError, TypeError, KeyError, RecursionError):
            raise JournalError(f"{path} is damaged: restore it from a copy, or use {fix}") from None
        if version != str(FORMAT):
            what = f"{path} has format {version}, this release reads format {FORMAT}"
            raise JournalError(f"{what}; use the release that wrote it, {fix}")
        for name, ours in self._configuration.items():
            theirs = str(facts.get(name))
            is_key = name == "compatibility_key"  # earlier releases had fewer keys
            if bool(differences(theirs, ours)) if is_key else theirs != ours:
                what = f"{path} is the replay of another configuration: {describe_differences(theirs, ours)}"
                raise JournalError(f"{what}; use the configuration it was made with, {fix}")
        if is_identity(replay_id := str(facts.get("replay"))):
            self.replay_id = replay_id
        if is_identity(run := str(facts.get("run"))):
            self.run = self.run or run
            if run != self.run:
                what = f"{path} is the replay of run {run}, {path.parent.parent} is of run {self.run}"
                raise JournalError(f"{what}: use the run_directory of its run, or move {path.parent} away")


def unreadable(path: Path, error: OSError) -> JournalError:
    """Returns the error of a file that cannot be read."""
    return JournalError(f"{path} cannot be read ({error.strerror}): mend that, or move it away")


def check_journal(config: Config, spec: SegmentSpec) -> None:
    """Raises the RunError with which a start would refuse the replay of a run, or its identity; writes nothing."""
    run = RunIdentity(config.directory).name
    if not config.replay.journal:
        return
    directory = Path(config.directory, "replay")
    Header(directory, config.compatibility_key, spec, run).read()
    for path in sorted(directory.glob("s*-*")):
        try:
            os.close(open_regular(path, os.O_RDONLY))
        except OSError as error:
            raise unreadable(path, error) from None
