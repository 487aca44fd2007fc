"""The evaluations of a run, in `<run directory>/evaluations.jsonl`: a line for each."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from apex_jax.run.metric_files import is_number
from apex_jax.run.provenance import read_records

FILE_NAME = "evaluations.jsonl"


class PlayedGames(NamedTuple):
    """One evaluation, as the evaluator has recorded it."""

    time: float  # of its end, unix seconds
    updates: int  # of the params
    exploration: float  # epsilon (DQN) or standard deviation of the noise (DPG)
    returns: np.ndarray  # float64[games], raw rewards
    info: Mapping[str, np.ndarray] = MappingProxyType({})  # float64[games] by name in `metrics.info`, NaN: none


def return_text(value: float, separator: str = "") -> str:
    """Returns a return with four digits, or more before its point, and at least one decimal: 0.955, 14.6, -29981.2.

    `separator`: between thousands.
    """
    decimals = min(6, max(1, 3 - math.floor(math.log10(abs(value))))) if value else 1
    text = f"{value:z{separator}.{decimals}f}".rstrip("0")
    return f"{text}0" if text.endswith(".") else text


def spread(returns: np.ndarray) -> dict[str, float]:
    """Returns the spread of the returns of an evaluation, float64[games], by its name in a line and in tags."""
    return {"lowest": float(returns.min()), "highest": float(returns.max()), "standard_deviation": float(returns.std())}


def read_evaluations(run_directory: str | os.PathLike[str]) -> list[PlayedGames]:
    """Returns the evaluations of a run, oldest first; none if there is no file."""
    records = map(_games, read_records(Path(run_directory, FILE_NAME)))
    return [games for games in records if games is not None]


def best_evaluation(run_directory: str | os.PathLike[str], updates: int) -> PlayedGames | None:
    """Returns the evaluation of the params after `updates` with most games, the newest of equals; or None.

    Evaluations of `RUN/best` are stored in that folder.
    """
    games_of_run = [*read_evaluations(run_directory), *read_evaluations(Path(run_directory, "best"))]
    candidates = [games for games in games_of_run if games.updates == updates]
    return max(candidates, key=lambda games: (games.returns.size, games.time), default=None)


def _games(record: dict[str, Any]) -> PlayedGames | None:
    """Returns the evaluation of a line; None if the line holds none, or one of an earlier format."""
    returns, numbers = record.get("returns"), [record.get(name) for name in ("updates", "exploration")]
    if not isinstance(returns, list) or not returns or not all(map(is_number, [*returns, *numbers])):
        return None
    found = record.get("info")
    columns = found.items() if isinstance(found, dict) else ()
    info = {name: np.array(column, np.float64) for name, column in columns if _is_column(column, len(returns))}
    games = record["time"], int(record["updates"]), record["exploration"], np.array(returns, np.float64), info
    return PlayedGames(*games)


def _is_column(column: object, games: int) -> bool:
    """Returns whether a value read from a file is a list of a number, or null, for each game."""
    if not isinstance(column, list) or len(column) != games:
        return False
    return all(number is None or is_number(number) for number in column)
