"""Where a run came from: one line in `<run directory>/starts.jsonl` for each start of it, one in `changes.jsonl` for
each with which it went on under other settings.

With `config.yaml` beside it, that is what somebody else needs to repeat the run, or to see why theirs is different.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from apex_jax.command_line import SETTINGS, load_as_written, to_yaml
from apex_jax.compatibility import differences, told
from apex_jax.config import RESULT_KEYS, AddressConfig, Config
from apex_jax.disk import open_regular, read_regular, write_durably
from apex_jax.errors import UsageError, shown
from apex_jax.machine import usable_cores
from apex_jax.metrics import append_line, is_number

_log = logging.getLogger(__name__)

FILE_NAME = "starts.jsonl"
CONFIG_NAME = "config.yaml"
CHANGES_NAME = "changes.jsonl"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "numba", "envpool", "pyzmq", "orbax-checkpoint")
_CHECKOUT = Path(__file__).resolve().parents[2]


def check_resumable(config: Config, run_directory: str = "", fix: str = "") -> None:
    """Raises UsageError that names the settings with which the run of a directory cannot go on, and both values.

    Compares with its `config.yaml` alone, so that this takes no time; the checkpoints are compared when they are read.
    `run_directory`: where that is not the one of `config`; `fix`: what to do then.
    """
    directory = run_directory or config.directory
    has_checkpoint = _has(directory, "checkpoints", "[!.]*")
    if not has_checkpoint and not _has(directory, "replay", "segments-*"):
        return
    if (before := _written(directory)) is None:
        return
    was, now = (
        (each.checkpoint_compatibility_key if has_checkpoint else each.compatibility_key) for each in (before, config)
    )
    if differences(was, now):
        what = told(was, now)
        fix = fix or "choose a new run_directory, or the old values"
        raise UsageError(f"{directory} cannot be resumed: {what}; {fix}")


def _has(run_directory: str, folder: str, pattern: str) -> bool:
    try:
        return any(Path(run_directory, folder).glob(pattern))
    except OSError:
        return False


def record_start(config: Config) -> None:
    """Appends this start of the run to its directory. OSError where that cannot be written.

    Says where the run that is about to go on was begun with other settings: somebody may have meant a new one.
    """
    if changes := _changes(config):
        message = "%s resumes with changed settings, %s: to start afresh, choose another run_directory"
        _log.warning(message, config.directory, ", ".join(changes))
    append_line(Path(config.directory, FILE_NAME), json.dumps(_this_start(config)).encode() + b"\n")


def record_config(config: Config, is_start: bool = False) -> None:
    """Writes the run's configuration, whole, without the addresses: these are of this start only. OSError.

    What was another before is kept beside it. `is_start`: the start is not recorded yet.
    """
    if is_start:
        record_start(config)
    if changes := _changes(config):
        line = {"time": time.time(), "settings": changes}
        append_line(Path(config.directory, CHANGES_NAME), json.dumps(line).encode() + b"\n")
    path = Path(config.directory, CONFIG_NAME)
    write_durably(path, to_yaml(config.replace(addresses=AddressConfig())))


def _written(directory: str) -> Config | None:
    """Returns what `record_config` wrote into a run directory; None if there is nothing that can be read.

    OSError if something else has its name: opening a FIFO would wait for ever.
    """
    path = Path(directory, CONFIG_NAME)
    try:
        os.close(open_regular(path, os.O_RDONLY))
        return load_as_written(path)
    except (UsageError, FileNotFoundError, NotADirectoryError, PermissionError):
        return None


def _changes(config: Config) -> list[str]:
    """Returns what is not as `record_config` found it; nothing where that cannot be read."""
    if (before := _written(config.directory)) is None:
        return []
    return [
        f"{name}={shown(now)} (was {shown(was)})"
        for name in SETTINGS
        if name.startswith(RESULT_KEYS) and (now := value_of(config, name)) != (was := value_of(before, name))
    ]


def value_of(config: Config, name: str) -> Any:
    """Returns the value of the key of this dotted name."""
    group, _, key = name.rpartition(".")
    return getattr(getattr(config, group) if group else config, key)


def read_starts(run_directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns what `record_start` wrote, oldest first, without lines torn by a kill; empty where there is no file."""
    return _read_lines(Path(run_directory, FILE_NAME))


def read_changes(run_directory: str | os.PathLike[str]) -> list[str]:
    """Returns the settings that changed on the way, as `record_config` found them, oldest first."""
    settings = [line.get("settings") for line in _read_lines(Path(run_directory, CHANGES_NAME))]
    return [shown(change) for changes in settings if isinstance(changes, list) for change in changes]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file that are whole and have their time."""
    try:
        lines = read_regular(path).splitlines()
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and is_number(record.get("time")):
            records.append(record)
    return records


def commit() -> str | None:
    """Returns the commit of this checkout; None where it is none."""
    return _git("rev-parse", "HEAD")


def version(package: str) -> str | None:
    """Returns the version of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _this_start(config: Config) -> dict[str, Any]:
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "time": time.time(),  # unix seconds
        "command": _command(),
        "task": config.environment.task,
        "seed": config.seed,
        "commit": commit(),
        "uncommitted_changes": None if changes is None else changes != "",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "processor": _processor(),
        "cores": usable_cores(),
    }


def _command() -> str:
    """Returns the command as it is typed in the checkout, wherever that is."""
    return shlex.join([Path(sys.executable).name, Path(sys.argv[0]).name, *sys.argv[1:]])


def _git(*arguments: str) -> str | None:
    """Returns what git says of this checkout; None where it is none, or where there is no git."""
    try:
        command = ["git", "-C", str(_CHECKOUT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
