"""Reads runs: their returns over frames and minutes, and which runs differ only in the seed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from apex_jax.config import Config
from apex_jax.config.load import CONFIG_NAME, SETTINGS, config_of, load_run
from apex_jax.environments.atari_scores import human_normalized_score
from apex_jax.host.disk import read_regular
from apex_jax.host.errors import RunError, UsageError, printable, short_repr
from apex_jax.run.identity import RunIdentity
from apex_jax.run.metrics import TRAINING_TAG, checked_line, read_metrics
from apex_jax.run.provenance import changes_of, is_record, read_starts, value_of

NOT_OF_THE_METHOD = (
    "seed",
    "run_directory",
    "page_port",
    "total_",
    "metrics_interval_seconds",
    "learner.checkpoint",
    "addresses.",
    "evaluator.",
    "security.",
    "storage.",
    "metrics.",
)
LABEL_KEYS = 3  # maximum number of keys in a label
EVALUATION = "eval/episodic_return"


class Curve(NamedTuple):
    """Episode returns in the order of measurement; frames and minutes never decrease."""

    frames: np.ndarray  # float64[points], emulator frames of the whole run
    minutes: np.ndarray  # float64[points], wall-clock time of the run, without the pauses between its starts
    returns: np.ndarray  # float64[points], mean of the games, raw rewards


@dataclass(frozen=True)
class Run:
    """The content of a run directory."""

    directory: str
    task: str
    evaluation: Curve
    training: Mapping[str, Curve]  # by band of exploration, a name of `apex_jax.run.metrics.Bands`
    settings: Mapping[str, Any]  # every key of its configuration by dotted name; empty if there is none
    changed_settings: Sequence[str] = ()  # changed during the run; `settings` has only the new values

    @property
    def method(self) -> tuple[tuple[str, str], ...]:
        """The settings that runs share if they differ only in their seed."""
        return tuple((n, repr(v)) for n, v in self.settings.items() if not n.startswith(NOT_OF_THE_METHOD))

    def normalized(self, returns: np.ndarray) -> np.ndarray | None:
        """Returns human-normalised scores: 0 is random play, 1 the human tester; None for games without them."""
        zero, one = human_normalized_score(self.task, 0.0), human_normalized_score(self.task, 1.0)
        return None if zero is None or one is None else zero + (one - zero) * returns


class Group(NamedTuple):
    """Runs that are drawn as one line."""

    label: str
    runs: Sequence[Run]


def read_run(directory: str | os.PathLike[str]) -> Run:
    """Returns the run of a directory. Raises UsageError if there is none."""
    path = Path(directory)
    metrics = sorted(path.glob("metrics/*.jsonl"))
    if not metrics:
        what = "is a file" if path.is_file() else "no such directory"
        what = "holds no metrics/*.jsonl" if path.is_dir() else what
        raise UsageError(f"{short_repr(directory)}: {what}; give the directory of a run, such as runs/*")
    lines = [line for file in metrics for line in read_metrics(file)]
    if not any(EVALUATION in line for line in lines):
        lines += [line for file in _metrics_beside(path) for line in read_metrics(file)]
    config = load_run(path) if (path / CONFIG_NAME).exists() else None
    return run_of(str(directory), config, read_starts(path), lines)


def _metrics_beside(path: Path) -> list[Path]:
    """Returns the metrics of the same run in the folders beside its directory, such as those of a fleet's evaluator."""
    path = path.resolve()
    identity = _identity_of(path)
    beside = [folder for folder in path.parent.iterdir() if folder != path and folder.is_dir()]
    same = [folder for folder in beside if identity and _identity_of(folder) == identity]
    return sorted(file for folder in same for file in folder.glob("metrics/*.jsonl"))


def _identity_of(path: Path) -> str:
    try:
        return RunIdentity(str(path)).name
    except RunError:  # another program's folder
        return ""


def run_of(
    name: str,
    config: Config | None,
    starts: Sequence[Mapping[str, Any]],
    all_lines: Sequence[Mapping[str, Any]],
) -> Run:
    """Returns the run of these records; `all_lines`: the metrics of all its processes."""
    settings = {name: value_of(config, name) for name in SETTINGS} if config is not None else {}
    bands = sorted({tag for line in all_lines for tag in line if tag.startswith(TRAINING_TAG)})
    curves = curves_of(starts, all_lines, [EVALUATION, *bands])
    return Run(
        directory=name,
        task=str(settings.get("environment.task") or next((start.get("task") for start in starts), "?")),
        evaluation=curves[EVALUATION],
        training={tag.removeprefix(TRAINING_TAG): curves[tag] for tag in bands},
        settings=settings,
        changed_settings=changes_of(starts),
    )


def curves_of(
    starts: Sequence[Mapping[str, Any]], all_lines: Sequence[Mapping[str, Any]], tags: Iterable[str]
) -> dict[str, Curve]:
    """Returns the curve of each tag, with its values in the field `returns`, also if they are not returns."""
    minutes = _Minutes([start["time"] for start in starts], [line["time"] for line in all_lines])
    return {tag: _curve(all_lines, tag, minutes) for tag in tags}


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Groups the runs that differ only in the seed; the label of a group names the keys in which it differs.

    The only group is labelled "all runs" or, if it has one run, with the directory. Runs whose settings differ only in
    the game and the seed are one group.
    """
    by_method: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    unknown = [Group(run.directory, [run]) for run in runs if not run.settings]
    for run in runs:
        if run.settings:
            method = tuple((name, value) for name, value in run.method if name != "environment.task")
            by_method.setdefault(method, []).append(run)
    apart = [name for name in SETTINGS if len({dict(method).get(name) for method in by_method}) > 1]
    labels = _labels([members[0] for members in by_method.values()], apart)
    if len(by_method) == 1:
        [members] = by_method.values()
        labels = ["all runs" if len(members) > 1 else members[0].directory]
    return [Group(label, members) for label, members in zip(labels, by_method.values(), strict=True)] + unknown


def _labels(runs: Sequence[Run], apart: Sequence[str]) -> list[str]:
    """Returns each run's label: its first distinguishing keys."""
    short = {name: name.rpartition(".")[2] for name in apart}
    names = {name: name if list(short.values()).count(short[name]) > 1 else short[name] for name in apart}
    more = [f"{len(apart) - LABEL_KEYS} more"] if len(apart) > LABEL_KEYS else []
    return [
        ", ".join([*(f"{names[key]}={short_repr(run.settings[key])}" for key in apart[:LABEL_KEYS]), *more])
        for run in runs
    ]


class _Minutes:
    """Turns unix seconds into minutes of the run, without the time from a start's last metrics to the next start."""

    def __init__(self, starts: Sequence[float], signs_of_life: Sequence[float]):
        signs = np.array(sorted(signs_of_life))
        first = signs[:1].tolist() or [0.0]
        if not starts or first[0] < min(starts):  # the first start was not recorded
            starts = [*first, *starts]
        starts = sorted(starts)
        self._times: list[float] = []
        self._minutes: list[float] = []
        minutes = 0.0
        for start, following in zip(starts, [*starts[1:], np.inf], strict=True):
            lived = signs[(signs >= start) & (signs < following)]
            end = float(lived[-1]) if lived.size else start
            self._times += [start, end]
            self._minutes += [minutes, minutes + (end - start) / 60]
            minutes = self._minutes[-1]

    def __call__(self, times: Sequence[float]) -> np.ndarray:
        return np.interp(times, self._times, self._minutes)


def _curve(lines: Iterable[Mapping[str, Any]], tag: str, minutes: _Minutes) -> Curve:
    points = sorted((line["time"], line["step"], line[tag]) for line in lines if line.get(tag) is not None)
    times, frames, returns = np.array(points, np.float64).reshape(-1, 3).T
    # Each start resumes from a checkpoint: points that earlier starts made after it are not part of the run.
    kept = frames <= np.minimum.accumulate(frames[::-1])[::-1]
    return Curve(frames[kept], minutes(times.tolist())[kept], returns[kept])


def steps(curves: Sequence[Curve], axis: str, most: int = 1_000) -> np.ndarray:
    """Returns the positions at which any of the curves takes a new value while all have one: float64[points].

    `axis` is "frames" or "minutes". If there are more than `most`, returns an even grid of `most` positions, which is
    finer than a picture's pixels. Empty if one curve ends before another begins.
    """
    first, last = max(getattr(curve, axis)[0] for curve in curves), min(getattr(curve, axis)[-1] for curve in curves)
    positions = np.unique(np.concatenate([getattr(curve, axis) for curve in curves]))
    positions = positions[(positions >= first) & (positions <= last)]
    return positions if positions.size <= most else np.linspace(first, last, most)


def held(curve: Curve, axis: str, grid: np.ndarray) -> np.ndarray:
    """Returns the newest return at or before each position of the grid, which must not begin before the curve."""
    return curve.returns[np.searchsorted(getattr(curve, axis), grid, side="right") - 1]


# Statistics for few runs (Agarwal et al. 2021): interquartile mean and stratified bootstrap intervals ----------------


RESAMPLES = 2_000
CONFIDENCE = 0.95
FEWEST_RUNS = 3  # of each game; a bootstrap interval of two is their range


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Returns the mean of the middle half along axis 0; a score that a quartile divides counts in part.

    This defines it also if the number of runs is not divisible by four: of three runs the middle one has weight 2/3,
    the others 1/6 each.
    """
    edges = np.linspace(0, 1, len(scores) + 1)
    weights = np.diff(np.clip(edges, 0.25, 0.75)) * 2
    return np.tensordot(weights, np.sort(scores, axis=0), axes=1)


def bootstrap_interval(
    strata: Sequence[np.ndarray], statistic: Callable[[np.ndarray], np.ndarray], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and the upper end of the percentile interval of `statistic`, each with the shape of its result.

    `strata`: for each game the scores of its runs, float[runs, ...]; runs are resampled with replacement within their
    game. With three runs of each game, an interval is only a rough indication.
    """
    values = []
    for _ in range(RESAMPLES):
        drawn = [scores[rng.integers(len(scores), size=len(scores))] for scores in strata]
        values.append(statistic(np.concatenate(drawn)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail], axis=0)
    return low, high


# Several runs in one file, one JSON object per line: the data that `plot` needs, without checkpoints and logs --------


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
