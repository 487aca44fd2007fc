"""Several runs in one file, one JSON object per line: the data that `plot` needs, without checkpoints and logs.

An object has `name`, `config` (key -> value, as in config.yaml; empty if unknown), `starts` (the lines of
starts.jsonl), and `metrics` (process -> lines of its metrics). Older ones have more.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from apex_jax.config.load import config_of
from apex_jax.host.disk import read_regular
from apex_jax.host.errors import UsageError, printable, short_repr
from apex_jax.plotting.curves import Run, run_of
from apex_jax.run.metric_files import checked_line
from apex_jax.run.provenance import is_record

ENDING = ".jsonl"


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Returns whether this is a file of packed runs, by its name."""
    return Path(path).suffix == ENDING and Path(path).is_file()


def read_packed(path: str | os.PathLike[str]) -> list[Run]:
    """Returns the runs of a file. Raises UsageError that names the invalid line or the empty file, and OSError."""
    runs = []
    for number, line in enumerate(read_regular(Path(path)).splitlines(), start=1):
        try:
            runs.append(_run(json.loads(line), f"{path}:{number}"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # UsageError is a ValueError
            raise UsageError(f"{short_repr(path)}: line {number} is no packed run; restore the file") from None
    if not runs:
        raise UsageError(f"{short_repr(path)}: holds no run; give a file that was packed, or the directory of a run")
    return runs


def _run(values: dict[str, Any], place: str) -> Run:
    """Returns the run of one line. Raises ValueError, TypeError, KeyError or AttributeError for wrong types."""
    lines = [checked_line(line) for of_process in values["metrics"].values() for line in of_process]
    starts = [start for start in values["starts"] if is_record(start)]
    config = config_of(values["config"]) if values["config"] else None
    name = printable(str(values.get("name") or place))
    return run_of(name, config, starts, [line for line in lines if line])
