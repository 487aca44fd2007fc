"""The evaluations of a run: a line for each in `evaluations.jsonl`, and the params of the best one in `best/`.

`<run directory>/best/` can be played and loaded like a run:

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
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from apex_jax.config import Config
from apex_jax.host.disk import read_regular, run_of_checkpoint, write_durably
from apex_jax.host.errors import first_line
from apex_jax.run.checkpoint_files import FIX_OF_DIFFERENCE, CheckpointError
from apex_jax.run.environment_spec import record_environment_spec
from apex_jax.run.metrics import EVALUATED_INFO, EVALUATED_RETURN, append_line, is_number
from apex_jax.run.provenance import read_records, write_config
from apex_jax.types import EnvironmentSpec

_log = logging.getLogger(__name__)

FILE_NAME = "evaluations.jsonl"
OPTIONAL = ("environment_steps", "frames", "seconds", "human_normalized")  # of a line


class Evaluation(NamedTuple):
    """Full games of one policy, with raw rewards."""

    time: float  # of its end, unix seconds
    updates: int  # of the params
    exploration: float  # epsilon (DQN) or standard deviation of the noise (DPG)
    returns: np.ndarray  # float64[games]
    info: Mapping[str, np.ndarray] = MappingProxyType({})  # float64[games] by name in `metrics.info`, NaN: none
    environment_steps: int = 0  # of the whole run, at those updates
    frames: int = 0  # emulator frames of these steps
    seconds: float = 0.0  # that the games took
    human_normalized: float | None = None  # score as a fraction; None for tasks without a human score

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(self.returns.mean())

    @property
    def spread(self) -> dict[str, float]:
        """The spread of the returns, by its name in a line and in tags."""
        returns = self.returns
        lowest, highest = float(returns.min()), float(returns.max())
        return {"lowest": lowest, "highest": highest, "standard_deviation": float(returns.std())}

    def values(self) -> dict[str, float]:
        """Returns the evaluation under the tags of `apex_jax.run.metrics.TAGS`."""
        values = {
            EVALUATED_RETURN: self.mean,
            "eval/episodic_return_median": float(np.median(self.returns)),
            **{f"eval/episodic_return_{name}": value for name, value in self.spread.items()},
            "eval/episodes": len(self.returns),
            "eval/seconds": self.seconds,
            "eval/updates": self.updates,
            "eval/frames": self.frames,
        }
        for name, numbers in self.info.items():
            if np.isfinite(numbers).any():
                values[f"{EVALUATED_INFO}{name}"] = float(np.nanmean(numbers))
        score = self.human_normalized
        return values if score is None else values | {"eval/human_normalized_score": score}

    def describe(self) -> str:
        """Returns the evaluation as one line."""
        games, spread = len(self.returns), self.spread
        text = (
            f"mean return {return_text(self.mean)}, median {return_text(float(np.median(self.returns)))},"
            f" lowest {spread['lowest']:g}, highest {spread['highest']:g},"
            f" standard deviation {return_text(spread['standard_deviation'])} over {games} game{'s' * (games != 1)}"
        )
        if self.human_normalized is not None:
            text += f", human-normalised {self.human_normalized:.0%}"
        return f"{text}, after {self.updates:,} updates and {self.frames:,} frames"

    def store(self, run_directory: str, seed: int) -> None:
        """Appends the evaluation, with the returns of all games, to the run's evaluations; `seed`: of the games."""
        line = self._asdict() | {
            "seed": seed,
            "mean": self.mean,
            **self.spread,
            "returns": self.returns.tolist(),
            "info": {
                name: [number if np.isfinite(number) else None for number in numbers.tolist()]
                for name, numbers in self.info.items()
            },
        }
        try:
            append_line(Path(run_directory, FILE_NAME), json.dumps(line).encode() + b"\n")
        except OSError as error:  # not fatal: the run directory of another user may be read-only
            _log.warning("the games' returns are not kept: %s", error)


def return_text(value: float, separator: str = "") -> str:
    """Returns a return with four digits, or more before its point, and at least one decimal: 0.955, 14.6, -29981.2.

    `separator`: between thousands.
    """
    decimals = min(6, max(1, 3 - math.floor(math.log10(abs(value))))) if value else 1
    text = f"{value:z{separator}.{decimals}f}".rstrip("0")
    return f"{text}0" if text.endswith(".") else text


def read_evaluations(run_directory: str | os.PathLike[str]) -> list[Evaluation]:
    """Returns the evaluations of a run, oldest first; none if there is no file."""
    found = map(_evaluation, read_records(Path(run_directory, FILE_NAME)))
    return [evaluation for evaluation in found if evaluation is not None]


def best_evaluation(run_directory: str | os.PathLike[str], updates: int) -> Evaluation | None:
    """Returns the evaluation of the params after `updates` with most games, the newest of equals; or None.

    Evaluations of `RUN/best` are stored in that folder.
    """
    of_run = [*read_evaluations(run_directory), *read_evaluations(Path(run_directory, "best"))]
    candidates = [each for each in of_run if each.updates == updates]
    return max(candidates, key=lambda each: (each.returns.size, each.time), default=None)


def _evaluation(record: dict[str, Any]) -> Evaluation | None:
    """Returns the evaluation of a line; None if the line holds none, or one of an earlier format."""
    returns, numbers = record.get("returns"), [record.get(name) for name in ("updates", "exploration")]
    if not isinstance(returns, list) or not returns or not all(map(is_number, [*returns, *numbers])):
        return None
    found = record.get("info")
    columns = found.items() if isinstance(found, dict) else ()
    info = {name: np.array(column, np.float64) for name, column in columns if _is_column(column, len(returns))}
    more = {name: record[name] for name in OPTIONAL if is_number(record.get(name))}  # earlier lines have fewer
    counts = record["time"], int(record["updates"]), record["exploration"]
    return Evaluation(*counts, np.array(returns, np.float64), info, **more)


def _is_column(column: object, games: int) -> bool:
    """Returns whether a value read from a file is a list of a number, or null, for each game."""
    if not isinstance(column, list) or len(column) != games:
        return False
    return all(number is None or is_number(number) for number in column)


# The params of the best evaluation ------------------------------------------------------------------------------------


FOLDER = "best"  # in the run directory
RECORD_NAME = "evaluation.json"
FORMAT = 1
INVALID = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)  # raised for a damaged folder


def is_best(directory: str | os.PathLike[str]) -> bool:
    """Returns whether this is the folder of a best evaluation, complete or not, and no run directory."""
    return Path(directory, RECORD_NAME).exists() or any(Path(directory).glob("params-*"))


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
        write_durably(folder / RECORD_NAME, json.dumps(record, indent=2) + "\n")
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
    record: dict[str, Any] = json.loads(read_regular(folder / RECORD_NAME))
    if (saved := record["format"]) != FORMAT:
        raise ValueError(f"its format is {saved}, not {FORMAT}")
    if re.fullmatch("params-[0-9]+", record["params"]) is None:
        raise ValueError("it names no file of params")
    return record
