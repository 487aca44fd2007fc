"""The data of a run's page, as a JSON document: progress, curves, warnings, settings and film."""

from __future__ import annotations

import base64
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apex_jax.config import Config
from apex_jax.host.disk import read_regular
from apex_jax.operations.live_view import rows
from apex_jax.operations.progress import RunProgress
from apex_jax.plotting.curves import EVALUATION, UPDATES, Curve, curves_of
from apex_jax.plotting.video import ENCODERS, video_of_run
from apex_jax.run.evaluations import return_text
from apex_jax.run.metric_files import MetricsFollower
from apex_jax.run.provenance import chosen_settings, machine_of, read_starts, shown_command

POLL_SECONDS = 3.0  # between two requests of a page
MOST_LINES = 5_000  # of the metrics of one process; of more, one is kept in each span of time, of equal lengths
MOST_POINTS = 400  # of a curve
MOST_INLINED_BYTES = 5 * 2**20  # a larger film is left out of a report
TRAINING, LOSS = "charts/episodic_return", "losses/td_loss"
SPREAD = ("eval/episodic_return_lowest", "eval/episodic_return_highest", "eval/episodic_return_standard_deviation")
GAMES, SECONDS = "eval/episodes", "eval/seconds"
FRAME_RATE, UPDATE_RATE = "charts/environment_frames_per_second", "charts/updates_per_second"
KEPT = ("time", "step", UPDATES, EVALUATION, TRAINING, LOSS, FRAME_RATE, UPDATE_RATE, *SPREAD, GAMES, SECONDS)
MEDIA = {".mp4": "video/mp4", ".gif": "image/gif"}  # by ending of a film


class RunLines:
    """Follows the metrics of all processes of a run, without using more memory the longer the run lasts."""

    def __init__(self, run_directory: str) -> None:
        self._folder = Path(run_directory, "metrics")
        self._processes: dict[Path, _ProcessLines] = {}

    def read(self) -> list[dict[str, Any]]:
        """Returns the lines so far, with the tags in KEPT only, FRAME_RATE as `frame_rate_of` its process."""
        for path in sorted(self._folder.glob("*.jsonl")):
            self._processes.setdefault(path, _ProcessLines(path))
        return [line for process in self._processes.values() for line in process.read()]


class _ProcessLines:
    """Follows the metrics of one process."""

    def __init__(self, path: Path) -> None:
        self._follower = MetricsFollower(path)
        self._names = {tag: tag for tag in KEPT} | {FRAME_RATE: frame_rate_of(path.stem)}
        self._lines: list[dict[str, Any]] = []
        self._span_seconds = 0.0  # of which one line is kept; 0 = all are

    def read(self) -> list[dict[str, Any]]:
        """Returns at most MOST_LINES lines, whose distances are equal from the beginning to the end of the run."""
        new = self._follower.read_new()
        self._lines += [{name: line[tag] for tag, name in self._names.items() if tag in line} for line in new]
        if self._span_seconds:
            self._thin()
        while len(self._lines) > MOST_LINES:
            self._span_seconds = max(1.0, 2 * self._span_seconds)
            self._thin()
        return self._lines

    def _thin(self) -> None:
        """Keeps the last line of each span of time."""
        spans = [int(line["time"] / self._span_seconds) for line in self._lines]
        is_last = [span != following for span, following in zip(spans, [*spans[1:], None], strict=False)]
        self._lines = list(itertools.compress(self._lines, is_last))


def frame_rate_of(process: str) -> str:
    """Returns the tag of the frames per second that one replay server has received."""
    return f"{FRAME_RATE} of {process}"


def page_data(config: Config, lines: Sequence[Mapping[str, Any]], progress: RunProgress | None) -> dict[str, Any]:
    """Returns the data of a page that asks for more every POLL_SECONDS; without `progress`, only what files hold."""
    shown = dict(rows(progress)) if progress is not None else {}
    processes = shown.pop("processes", "")
    starts = read_starts(config.directory)
    facts = {
        "directory": Path(config.directory).absolute().name,
        "command": shown_command(str(starts[-1].get("command") or "")) if starts else "",
        "commit": str(starts[-1].get("commit") or "")[:12] if starts else "",
        "machine": machine_of(starts[-1]) if starts and "cores" in starts[-1] else "",
        "processes": processes,
        "newest evaluation": _spread(lines),
    }
    return {
        "task": config.environment.task,
        "phase": progress.phase if progress is not None else "",
        "share": progress.share if progress is not None else None,
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "poll_seconds": POLL_SECONDS,
        "warnings": list(progress.warnings) if progress is not None else [],
        "tiles": [_tile(name, text) for name, text in shown.items()],
        "charts": _charts(_curves(config, starts, lines)),
        "facts": [[name, text] for name, text in facts.items() if text],
        "settings": [list(setting) for setting in chosen_settings(config)],
        "film": _film(config),
    }


def report_data(data: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Returns the data of a report: that of a page, with a small film in it, and nothing to ask for."""
    film, path = data["film"], film_of(config)
    if film is not None and path is not None:
        content = read_regular(path) if path.stat().st_size <= MOST_INLINED_BYTES else b""
        source = f"data:{MEDIA[path.suffix]};base64,{base64.b64encode(content).decode()}"
        film = {**film, "source": source} if content else None
    return {**data, "film": film, "poll_seconds": 0}


def film_of(config: Config) -> Path | None:
    """Returns the newest film of the run; None if there is none."""
    path = Path(video_of_run(config.evaluator.video or "video", config.directory))
    films = [path] if path.suffix in ENCODERS else [path.with_suffix(suffix) for suffix in ENCODERS]
    return next((film for film in films if film.is_file() and not film.is_symlink()), None)


def _film(config: Config) -> dict[str, str] | None:
    if (path := film_of(config)) is None:
        return None
    modified = path.stat().st_mtime
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(modified))
    kind = MEDIA[path.suffix].partition("/")[0]
    return {"source": f"film?{modified}", "kind": kind, "caption": f"{path.name}, written {written}"}


def _tile(name: str, text: str) -> dict[str, str]:
    """Returns a row of the live view with its number apart: "98,765, 42.1 per second" is 98,765 and a detail."""
    parts = re.fullmatch(r"(none yet|[^ ]*?),?(?: (.*))?", text)
    value, detail = parts.groups("") if parts else (text, "")
    return {"name": name, "value": value, "detail": detail}


def _spread(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns the spread of the newest evaluation, and how long it took; empty if there is none."""
    tags = (*SPREAD, GAMES, SECONDS)
    evaluations = [line for line in lines if all(line.get(tag) is not None for tag in tags)]
    if not evaluations:
        return ""
    newest = max(evaluations, key=lambda line: line["time"])
    lowest, highest, deviation = (return_text(newest[tag]) for tag in SPREAD)
    took = f"{newest[GAMES]:.0f} games in {newest[SECONDS]:.1f} s"
    return f"{took}, returns from {lowest} to {highest}, standard deviation {deviation}"


def _curves(
    config: Config, starts: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Curve]:
    """Returns the curve of each tag in KEPT; that of FRAME_RATE is the sum over the replay servers."""
    rates = sorted({tag for line in lines for tag in line if tag.startswith(FRAME_RATE)}) or [FRAME_RATE]
    curves = curves_of(starts, lines, [EVALUATION, TRAINING, LOSS, UPDATE_RATE, *rates])
    return curves | {FRAME_RATE: _sum([curves[rate] for rate in rates], config.metrics_interval_seconds / 60)}


def _sum(curves: Sequence[Curve], interval_minutes: float) -> Curve:
    """Returns the sum of each curve's newest value, at the points of all; the value of a process that is gone is 0.

    A process is gone if three of its values are missing. `interval_minutes`: between two values, of which `RunLines`
    may have dropped some.
    """
    distances = np.concatenate([np.diff(curve.minutes) for curve in curves])
    most_minutes = 3 * max(interval_minutes, float(np.median(distances)) if distances.size else 0.0)
    columns = [np.concatenate(column) for column in zip(*curves, strict=True)]
    minutes = columns[1][order := np.argsort(columns[1], kind="stable")]
    total = np.zeros(len(minutes))
    for curve in curves:
        known = np.concatenate(([-np.inf], curve.minutes))  # at first none
        newest = np.searchsorted(known, minutes, side="right") - 1
        total += np.where(minutes - known[newest] <= most_minutes, np.append(0.0, curve.returns)[newest], 0.0)
    return Curve(columns[0][order], minutes, total)


def _charts(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    returns = {"evaluation": curves[EVALUATION], "training, exploring": curves[TRAINING]}
    loss, frames, updates = curves[LOSS], curves[FRAME_RATE], curves[UPDATE_RATE]
    loss = Curve(*(column[loss.returns > 0] for column in loss))  # the scale is logarithmic
    return [
        _chart("Return over time", "minutes", "return", returns),
        _chart("Return over experience", "frames", "return", returns),
        _chart("Loss of the learner", "minutes", "loss, logarithmic", {"": loss}, scale="log"),
        _chart("Speed of the actors", "minutes", "frames per second", {"": frames}, scale="zero"),
        _chart("Speed of the learner", "minutes", "updates per second", {"": updates}, scale="zero"),
    ]


def _chart(title: str, axis: str, unit: str, curves: Mapping[str, Curve], scale: str = "linear") -> dict[str, Any]:
    """`curves`: by their name in the legend; `scale`: linear, zero = linear and from 0, or log."""
    series = [
        {"name": name, "x": _thinned(getattr(curve, axis)), "y": _thinned(curve.returns)}
        for name, curve in curves.items()
    ]
    return {"title": title, "x": axis, "y": unit, "scale": scale, "series": series}


def _thinned(values: np.ndarray) -> list[float]:
    """Returns at most MOST_POINTS of the values, the first and the last among them, with 6 digits."""
    if len(values) > MOST_POINTS:
        values = values[np.linspace(0, len(values) - 1, MOST_POINTS).astype(int)]
    return [float(f"{value:.6g}") for value in values.tolist()]
