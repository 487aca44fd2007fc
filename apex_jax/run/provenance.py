"""The origin of a run: a line in `<run directory>/starts.jsonl` for each start, with the settings that it changed.

With these lines and `config.yaml`, others can repeat the run, or find out why their own run differs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from apex_jax.config import AddressConfig, Config
from apex_jax.config.load import CONFIG_NAME, RESULT_KEYS, SETTINGS, code_settings, config_path, load_run, to_yaml
from apex_jax.host.disk import open_regular, read_regular, write_durably
from apex_jax.host.errors import UsageError, printable, short_repr
from apex_jax.host.machine import usable_cores
from apex_jax.host.program import CHECKOUT, NAME
from apex_jax.host.user_code import look_in, source_file
from apex_jax.run.identity import describe_differences, differences
from apex_jax.run.metrics import append_line, is_number, json_lines

_log = logging.getLogger(__name__)

FILE_NAME = "starts.jsonl"
PARAMS_NAME = "model.safetensors"  # in the folder of an exported policy, or of a best evaluation
LATEST_SECONDS = 2.0**37  # of a recorded time; Python has no dates after the year 9999
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "numba", "envpool", "pyzmq", "orbax-checkpoint")
OF_THE_MACHINE = ("addresses", "security", "storage", "run_directory")
"""Groups and keys that concern only the machine of a run; they are not shown to others."""


def check_resumable(config: Config, run_directory: str = "", fix: str = "") -> None:
    """Raises UsageError if the run in a directory cannot resume with these settings; names both values.

    Compares only with its `config.yaml`, which is fast; checkpoints are compared when they are read. `run_directory`:
    empty = that of `config`; `fix`: end of the message, which advises the user; empty = the usual advice.
    """
    directory = run_directory or config.directory
    folder, saved = Path(directory), ("checkpoints/[!.]*", PARAMS_NAME)
    has_checkpoint = any(any(folder.glob(pattern)) for pattern in saved)
    if not has_checkpoint and not any(folder.glob("replay/segments-*")):
        return
    if (before := _written(directory)) is None:
        return
    was, now = (
        (each.checkpoint_compatibility_key if has_checkpoint else each.compatibility_key) for each in (before, config)
    )
    if differences(was, now):
        what = describe_differences(was, now)
        fix = fix or "choose a new run_directory, or the old values"
        raise UsageError(f"{directory} cannot be resumed: {what}; {fix}")


def record_start(config: Config, **more: Any) -> None:
    """Appends this start to the run directory, with `more` values. Raises OSError if that cannot be written.

    Logs a warning if the run resumes with changed settings, because the user may have meant a new run.
    """
    changes = [*changed_settings(config), *_changed_code(config)]
    line = json.dumps(_this_start(config) | {"changed_settings": changes} | more)
    append_line(Path(config.directory, FILE_NAME), line.encode() + b"\n")
    if changes:
        message = "%s resumes with changed settings, %s: to start afresh, choose another run_directory"
        _log.warning(message, config.directory, ", ".join(changes))


def record_accelerator(config: Config, accelerator: str | None) -> None:
    """Adds the name of the accelerator, which only the learner knows, to the newest start. Raises OSError."""
    path = Path(config.directory, FILE_NAME)
    if starts := read_records(path):
        *before, _ = read_regular(path).splitlines(keepends=True)
        line = json.dumps(starts[-1] | {"accelerator": accelerator}).encode() + b"\n"
        write_durably(path, b"".join([*before, line]))


def write_config(config: Config, directory: str | os.PathLike[str]) -> None:
    """Writes the complete configuration of a run without the addresses, which differ at each start. Raises OSError."""
    write_durably(Path(directory, CONFIG_NAME), to_yaml(config.replace(addresses=AddressConfig())))


def _written(directory: str) -> Config | None:
    """Returns the configuration that `write_config` wrote into a run directory; None if none can be read.

    Raises OSError if the path is no regular file, such as a FIFO, which would block when it is opened.
    """
    try:
        os.close(open_regular(config_path(directory), os.O_RDONLY))
        return load_run(directory)
    except (UsageError, FileNotFoundError, NotADirectoryError, PermissionError):
        return None


def changed_settings(config: Config) -> list[str]:
    """Returns the settings that differ from the recorded configuration; none if that cannot be read."""
    if (before := _written(config.directory)) is None:
        return []
    return [
        f"{name}={short_repr(now)} (was {short_repr(was)})"
        for name in SETTINGS
        if name.startswith(RESULT_KEYS) and (now := value_of(config, name)) != (was := value_of(before, name))
    ]


def code_digests(config: Config) -> dict[str, str]:
    """Returns the SHA-256 of each file of the user's that the settings name, by setting, such as algorithm.name=a:b."""
    files = {
        f"{name}={value}": source_file(re.sub("^(gymnasium|vector|jax):", "", value))
        for name, value in code_settings(config).items()
    }
    return {setting: hashlib.sha256(file.read_bytes()).hexdigest() for setting, file in files.items() if file}


def find_code(run_directory: str | os.PathLike[str], is_named: bool) -> None:
    """Lets the modules that the settings name be found in the directory where the run was started, if nowhere else.

    `is_named`: whether the user has named code of this run; otherwise nothing is searched there.
    """
    starts = read_starts(run_directory)[-1:] if is_named else []
    folders = [start.get("working_directory") for start in starts]
    look_in(*(folder for folder in folders if isinstance(folder, str)))


def _changed_code(config: Config) -> list[str]:
    starts = read_starts(config.directory)
    before, now = (starts[-1].get("code") if starts else None), code_digests(config)
    before = before if isinstance(before, dict) else {}
    return [f"{setting} (its file has changed)" for setting in now if before.get(setting, now[setting]) != now[setting]]


def result_settings(config: Config) -> dict[str, Any]:
    """Returns the settings that affect a run's results, in groups as in its `config.yaml`: none of the machine."""
    record: dict[str, Any] = {}
    for name in SETTINGS:
        if name.startswith((*RESULT_KEYS, "total_")):
            group, _, key = name.rpartition(".")
            (record.setdefault(group, {}) if group else record)[key] = value_of(config, name)
    return record


def value_of(config: Config, name: str) -> Any:
    """Returns the value of the key of this dotted name."""
    group, _, key = name.rpartition(".")
    return getattr(getattr(config, group) if group else config, key)


def is_of_the_machine(name: str) -> bool:
    """Returns whether the key or group of this name is in OF_THE_MACHINE."""
    return name.partition(".")[0] in OF_THE_MACHINE


def shown_command(command: str) -> str:
    """Returns a command without the settings in OF_THE_MACHINE, on one line."""
    try:
        words = shlex.split(command)
    except ValueError:
        return printable(command)
    return printable(shlex.join(word for word in words if not is_of_the_machine(word.partition("=")[0])))


def chosen_settings(config: Config) -> list[tuple[str, str, str]]:
    """Returns (name, value, default) of each key that differs from its default, without those in OF_THE_MACHINE."""

    def text_of(value: Any) -> str:
        return short_repr(list(value) if isinstance(value, tuple) else value)

    return [
        (name, text_of(value), text_of(setting.default))
        for name, setting in SETTINGS.items()
        if not is_of_the_machine(name) and (value := value_of(config, name)) != setting.default
    ]


def playing_arguments(
    run: str | os.PathLike[str], config: Config, command: str = "--role evaluator checkpoint="
) -> str:
    """Returns the arguments that evaluate a run, for a shell; with the settings that name code, which must be given."""
    code = "".join(f" {name}={shlex.quote(value)}" for name, value in code_settings(config).items())
    return f"{command}{shlex.quote(os.fspath(run))}{code}"


def read_starts(run_directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the recorded starts, oldest first, without lines torn by a kill; empty if there is no file."""
    return read_records(Path(run_directory, FILE_NAME))


def machine_of(start: Mapping[str, Any]) -> str:
    """Returns the machine of a recorded start, such as "2 cores of an AMD EPYC, NVIDIA H100"."""
    accelerator = f", {start['accelerator']}" if start.get("accelerator") else ""
    return f"{start.get('cores')} cores of {start.get('processor')}{accelerator}"


def changes_of(starts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the settings that changed from one start of a run to another, oldest first, each once."""
    changes = [start.get("changed_settings") for start in starts]
    return list(dict.fromkeys(short_repr(change) for each in changes if isinstance(each, list) for change in each))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of a file such as `starts.jsonl`; none if there is no file."""
    try:
        return [record for record in json_lines(read_regular(path)) if is_record(record)]
    except OSError:
        return []


def is_record(record: object) -> bool:
    """Returns whether this is a line of such a file: it has a time that is a date."""
    return isinstance(record, dict) and is_number(record.get("time")) and 0 <= record["time"] < LATEST_SECONDS


def commit() -> str | None:
    """Returns the commit of this checkout; None if there is none."""
    return _git("rev-parse", "HEAD")


def version(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
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
        "code": code_digests(config),
        "working_directory": os.getcwd(),  # where the user's modules are
    }


def _command() -> str:
    """Returns the command as the user types it, without the folders of the programs."""
    if NAME == "apex-jax":
        return shlex.join([NAME, *sys.argv[1:]])
    return shlex.join([Path(sys.executable).name, Path(sys.argv[0]).name, *sys.argv[1:]])


def _git(*arguments: str) -> str | None:
    """Returns the output of git for this checkout; None if it is no checkout or there is no git."""
    if CHECKOUT is None:
        return None
    try:
        command = ["git", "-C", str(CHECKOUT), *arguments]
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
