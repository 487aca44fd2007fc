"""The evaluations of a run: a line for each in `evaluations.jsonl`, and the params of the best one in `best/`."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from apex_jax.config.load import EXPORTED_CONFIG_NAME
from apex_jax.host.disk import run_of_checkpoint
from apex_jax.run.metrics import EVALUATED_INFO, EVALUATED_RETURN, append_line, is_number
from apex_jax.run.provenance import PARAMS_NAME, read_records

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


# The folder of the best one, see `apex_jax.run.params_file` -----------------------------------------------------------


FOLDER = "best"  # in the run directory


def is_best(directory: str | os.PathLike[str]) -> bool:
    """Returns whether this is the folder of a run's best evaluation, and no run directory or exported policy."""
    is_one = Path(directory, PARAMS_NAME).exists() and not Path(directory, EXPORTED_CONFIG_NAME).exists()
    return is_one and Path(os.path.abspath(directory)).name == FOLDER


def run_directory_of(path: str | os.PathLike[str]) -> Path:
    """Returns the run directory of a path: a run, one of its checkpoints, or the folder of its best evaluation."""
    directory = Path(os.path.abspath(run_of_checkpoint(path)[0]))
    return directory.parent if is_best(directory) else directory
