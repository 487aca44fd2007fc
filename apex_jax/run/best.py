"""The params of a run's best evaluation, in `<run directory>/best/`, which can be played and loaded like a run.

    params-<time>       float32 leaves in tree order, see `transport.params_codec`
    interface.json      as in the run directory
    config.yaml         as in the run directory
    evaluation.json     return, updates and steps; the name, size and checksum of the params; written last

Only the file that `evaluation.json` names counts, so that a kill at any moment leaves either the old or the new params.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
import zlib
from pathlib import Path
from typing import Any

from apex_jax.config import Config
from apex_jax.host.disk import read_regular, run_of_checkpoint, write_durably
from apex_jax.host.errors import first_line
from apex_jax.run.checkpoint import FIX_OF_DIFFERENCE, CheckpointError
from apex_jax.run.environment_spec import record_environment_spec
from apex_jax.run.evaluations import Evaluation
from apex_jax.run.provenance import write_config
from apex_jax.types import EnvironmentSpec

_log = logging.getLogger(__name__)

FOLDER = "best"  # in the run directory
FILE_NAME = "evaluation.json"
FORMAT = 1
INVALID = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)  # raised for a damaged folder


def is_best(directory: str | os.PathLike[str]) -> bool:
    """Returns whether this is the folder of a best evaluation, complete or not, and no run directory."""
    return Path(directory, FILE_NAME).exists() or any(Path(directory).glob("params-*"))


def run_directory_of(path: str | os.PathLike[str]) -> Path:
    """Returns the run directory of a path: a run, one of its checkpoints, or the folder of its best evaluation."""
    directory = Path(os.path.abspath(run_of_checkpoint(path)[0]))
    return directory.parent if directory.name == FOLDER and is_best(directory) else directory


def keep_if_best(
    config: Config, environment_spec: EnvironmentSpec, evaluation: Evaluation, architecture: str, params: bytes
) -> bool:
    """Keeps these params if no evaluation of the run was as good; returns whether it did.

    `architecture`: digest of the network's leaves, see `transport.params_codec.architecture_of`. An error of the disk
    is logged, and the earlier params stay.
    """
    folder = Path(config.directory, FOLDER)
    name = f"params-{time.time_ns()}"
    try:
        if _kept_return(folder) >= evaluation.mean:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / name, params)
        record_environment_spec(folder, environment_spec)
        write_config(config, folder)
        record = {
            "format": FORMAT,
            "mean_return": evaluation.mean,
            "episodes": len(evaluation.returns),
            "updates": evaluation.updates,
            "environment_steps": evaluation.environment_steps,
            "frames": evaluation.frames,
            "unix_seconds": evaluation.time,
            "architecture": architecture,
            "params": name,
            "params_bytes": len(params),
            "params_crc32": zlib.crc32(params),
        }
        write_durably(folder / FILE_NAME, json.dumps(record, indent=2) + "\n")
        for path in folder.glob("*params-*"):  # also those of which a killed process has written only a part
            if path.name != name:
                path.unlink()
    except OSError as error:  # not fatal: training goes on, and the next better evaluation tries again
        _log.warning("the params of the best evaluation are not kept in %s: %s", folder, error)
        return False
    return True


def read_best(directory: str | os.PathLike[str], architecture: str) -> tuple[int, int, bytes]:
    """Returns updates and environment steps of the best evaluation, and its params.

    Raises CheckpointError if they are damaged or of another network.
    """
    folder = Path(directory)
    try:
        record = _read_record(folder)
        if record["architecture"] != architecture:
            what = f"has a different network: {record['architecture']}, not {architecture}"
            raise CheckpointError(f"{folder} {what}; {FIX_OF_DIFFERENCE}")
        params = read_regular(folder / record["params"])
        if (len(params), zlib.crc32(params)) != (record["params_bytes"], record["params_crc32"]):
            raise ValueError(f"{record['params']} is not as it was saved")
        return int(record["updates"]), int(record["environment_steps"]), params
    except INVALID as error:
        what = f"{folder} is damaged: {first_line(error)}"
        fix = f"if it was just replaced, try again, or play the newest checkpoint, checkpoint={folder.parent}"
        raise CheckpointError(f"{what}; {fix}") from None


def _kept_return(folder: Path) -> float:
    """Returns the return of the kept evaluation; minus infinity if there is none, or if its params are missing."""
    try:
        record = _read_record(folder)
        is_there = (folder / record["params"]).stat().st_size == record["params_bytes"]
        return float(record["mean_return"]) if is_there else -math.inf
    except INVALID:
        return -math.inf


def _read_record(folder: Path) -> dict[str, Any]:
    """Returns the content of `evaluation.json`. Raises OSError, or various exceptions if it is damaged."""
    record: dict[str, Any] = json.loads(read_regular(folder / FILE_NAME))
    if (saved := record["format"]) != FORMAT:
        raise ValueError(f"its format is {saved}, not {FORMAT}")
    if re.fullmatch("params-[0-9]+", record["params"]) is None:
        raise ValueError("it names no file of params")
    return record
