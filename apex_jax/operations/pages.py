"""The page of a local run at an address of this machine, and as a file, `report.html`; and the page of a fleet."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from apex_jax.config import Config
from apex_jax.host.disk import atomic_write, open_regular, read_regular
from apex_jax.host.errors import RunError, short_repr
from apex_jax.operations.live_view import rows
from apex_jax.operations.progress import RunProgress
from apex_jax.operations.records import ProcessStatus, Record
from apex_jax.plotting.curves import EVALUATION, Curve, curves_of
from apex_jax.plotting.video import ENCODERS, video_of_run
from apex_jax.process import StopSignal
from apex_jax.run.evaluations import FILE_NAME, return_text
from apex_jax.run.metrics import EVALUATED_INFO, TRAINING_INFO, MetricsFollower, read_metrics
from apex_jax.run.provenance import chosen_settings, machine_of, read_starts, shown_command
from apex_jax.transport.http_link import BACKLOG, Answer, HttpServer

_log = logging.getLogger(__name__)

REPORT_NAME = "report.html"  # in the run directory
HOST = "127.0.0.1"


def document(data: Mapping[str, Any]) -> str:
    """Returns the page as one HTML file with its data; the page shows texts of the data as text, not as HTML."""
    text = json.dumps(data, allow_nan=False).replace("<", r"\u003c")  # so that no text ends the script element
    return Path(__file__).with_name("page.html").read_text("utf-8").replace("{{data}}", text)


def write_report(config: Config, data: Callable[[], Mapping[str, Any]] | None = None) -> None:
    """Writes `report.html` to the run directory. Logs errors instead of raising them.

    `data`: returns the data of the page; None = only data from the files of the run.
    """
    try:
        lines, others = RunLines(config.directory), OtherRuns(config)
        content = data() if data is not None else page_data(config, lines.read(), None, others.read())
        with atomic_write(Path(config.directory, REPORT_NAME)) as half:
            half.write_text(document(report_data(content, config)), "utf-8")
    except Exception as error:  # the run goes on without it
        _log.warning("no %s: %s", REPORT_NAME, error)


class RunPage:
    """A context that serves the page of a run, and writes its report after each evaluation and at the end."""

    def __init__(self, config: Config):
        self.address = ""  # of the page, empty = there is none
        self._config = config
        self._lines, self._others = RunLines(config.directory), OtherRuns(config)
        self._lock = threading.Lock()  # of both
        self._progress: RunProgress | None = None
        self._server: HttpServer | None = None

    def __enter__(self) -> RunPage:
        """Binds the port. Raises RunError if that fails."""
        if self._config.page_port >= 0:
            fix = "choose another one, 0 for any that is free, or -1 for no page"
            self._server, self.address = serve_page(self._config.page_port, "page_port=", fix, self._answer)
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    def update(self, progress: RunProgress) -> None:
        """Shows `progress` from now on."""
        before, self._progress = self._progress, progress
        if before is not None and progress.latest_evaluation != before.latest_evaluation:
            write_report(self._config, self._data)

    def finish(self, progress: RunProgress) -> None:
        """Shows the last progress of the run, and writes the report."""
        warnings = self._progress.warnings if self._progress is not None else ()
        phase = "finished" if progress.reached_limits else "stopped"
        self._progress = replace(progress, phase=phase, roles={}, seconds_left=None, warnings=warnings)
        write_report(self._config, self._data)

    def _data(self) -> dict[str, Any]:
        with self._lock:
            return page_data(self._config, self._lines.read(), self._progress, self._others.read())

    def _answer(self, path: str) -> Answer | None:
        video = video_of(self._config) if path == "/video" else None
        if video is not None:
            return Answer(200, MEDIA[video.suffix], open(open_regular(video, os.O_RDONLY), "rb"))
        return answer_of_page(path, self._data)


def answer_of_page(path: str, data: Callable[[], Mapping[str, Any]]) -> Answer | None:
    """Answers a request for a page, or for its data."""
    if path == "/":
        return Answer(200, "text/html; charset=utf-8", document(data()).encode())
    is_data = path == "/data.json"
    return Answer(200, "application/json", json.dumps(data(), allow_nan=False).encode()) if is_data else None


def serve_page(port: int, key: str, fix: str, answer: Callable[[str], Answer | None]) -> tuple[HttpServer, str]:
    """Returns the server of a page on this machine, and its address. `key`, `fix`: for the RunError if it fails."""
    try:
        listener = socket.create_server((HOST, port), backlog=BACKLOG)
    except OSError as error:
        raise RunError(f"{key}{port} cannot be served: {os.strerror(error.errno or 0)}; {fix}") from None
    listener.setblocking(False)
    server = HttpServer(listener, answer, "page", is_loopback=True)
    return server, f"http://{HOST}:{listener.getsockname()[1]}/"


# The data of the page -----------------------------------------------------------------------------------------------


POLL_SECONDS = 3.0  # between two requests of a page
MOST_LINES = 5_000  # of the metrics of one process; at more, every second line is dropped, each time
MOST_POINTS = 400  # of a curve
MOST_INLINED_BYTES = 5 * 2**20  # a larger video is left out of a report
TRAINING, LOSS = "charts/episodic_return", "losses/td_loss"
SPREAD = ("eval/episodic_return_lowest", "eval/episodic_return_highest", "eval/episodic_return_standard_deviation")
GAMES, SECONDS = "eval/episodes", "eval/seconds"
UPDATE_RATE, REPLAY_SIZE = "charts/updates_per_second", "replay/size_transitions"
Q_VALUES, GRADIENT, LENGTH = "losses/q_values", "losses/gradient_norm", "charts/episodic_length"
CURVES = (EVALUATION, TRAINING, LOSS, UPDATE_RATE, REPLAY_SIZE, Q_VALUES, GRADIENT, LENGTH)
KEPT = ("time", "step", *CURVES, *SPREAD, GAMES, SECONDS)
OWN = "own/"  # followed by the name of a metric of an algorithm of one's own
NAMED = (TRAINING_INFO, EVALUATED_INFO, OWN)
MOST_OTHERS = 6  # other runs in the charts of returns
MEDIA = {".mp4": "video/mp4", ".gif": "image/gif"}  # by ending of a video


class RunLines:
    """Follows the metrics of all processes of a run, without using more memory the longer the run lasts."""

    def __init__(self, run_directory: str) -> None:
        self._folder = Path(run_directory, "metrics")
        self._processes: dict[Path, tuple[MetricsFollower, KeptLines]] = {}

    def read(self) -> list[dict[str, Any]]:
        """Returns the lines so far, with only the tags that the page shows."""
        for path in sorted(self._folder.glob("*.jsonl")):
            self._processes.setdefault(path, (MetricsFollower(path), KeptLines()))
        for follower, kept in self._processes.values():
            for line in follower.read_new():
                kept.add(line)
        return [line for _, kept in self._processes.values() for line in kept.lines]


class KeptLines:
    """The metrics of one process: at most MOST_LINES lines, at equal distances from the first to the newest."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self._count = 0  # lines added
        self._stride = 1  # every line of this many is kept, the others are dropped

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a line, with only the tags that the page shows."""
        if self._count % self._stride == 0:
            self.lines.append({tag: line[tag] for tag in line if tag in KEPT or tag.startswith(NAMED)})
        self._count += 1
        if len(self.lines) > MOST_LINES:
            self._stride *= 2
            self.lines = self.lines[::2]


class OtherRuns:
    """Follows the evaluations of the runs beside this one, in the same folder, that have the same task."""

    def __init__(self, config: Config) -> None:
        self._task, self._directory = config.environment.task, Path(config.directory).absolute()
        self._known: dict[Path, tuple[int, Curve | None]] = {}  # by directory: nanoseconds of its file, its curve

    def read(self) -> dict[str, Curve]:
        """Returns the curves of the runs evaluated last, at most MOST_OTHERS, by the name of their directory."""
        changed = dict[Path, int]()
        for path in self._directory.parent.glob(f"*/{FILE_NAME}"):
            with contextlib.suppress(OSError):  # it has just been deleted
                changed[path.parent] = path.stat().st_mtime_ns
        curves = dict[str, Curve]()
        for directory in sorted(changed, key=changed.__getitem__, reverse=True):
            if directory != self._directory and (curve := self._curve(directory, changed[directory])) is not None:
                curves[directory.name] = curve
            if len(curves) == MOST_OTHERS:
                break
        return curves

    def _curve(self, directory: Path, changed: int) -> Curve | None:
        known = self._known.get(directory)
        if known is None or known[0] != changed:
            starts, curve = read_starts(directory), None
            if starts and starts[-1].get("task") == self._task:
                lines = [line for file in sorted(directory.glob("metrics/*.jsonl")) for line in read_metrics(file)]
                curve = curves_of(starts, lines, [EVALUATION])[EVALUATION]
            known = self._known[directory] = changed, curve
        return known[1]


def page_data(
    config: Config,
    lines: Sequence[Mapping[str, Any]],
    progress: RunProgress | None,
    others: Mapping[str, Curve] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the data of a page, which requests it every POLL_SECONDS; without `progress`, only data from files.

    `others`: other runs to compare with, see `OtherRuns`.
    """
    records = rows(config, progress) if progress is not None else []
    starts = read_starts(config.directory)
    facts = {
        "directory": Path(config.directory).absolute().name,
        "command": shown_command(str(starts[-1].get("command") or "")) if starts else "",
        "commit": str(starts[-1].get("commit") or "")[:12] if starts else "",
        "machine": machine_of(starts[-1]) if starts and "cores" in starts[-1] else "",
        "processes": next((record.value for record in records if record.name == "processes"), ""),
        "newest evaluation": _spread(lines),
    }
    return {
        "task": config.environment.task,
        "phase": progress.phase if progress is not None else "",
        "share": progress.share if progress is not None else None,
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "poll_seconds": POLL_SECONDS,
        "warnings": list(progress.warnings) if progress is not None else [],
        "tiles": [record._asdict() for record in records if record.name != "processes"],
        "charts": charts(starts, lines, config.metrics_interval_seconds, others),
        "facts": [[name, text] for name, text in facts.items() if text],
        "settings": [list(setting) for setting in chosen_settings(config)],
        "video": _video(config),
    }


def report_data(data: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Returns the data of a report: that of a page, with a small video in it, and without requests."""
    video, path = data["video"], video_of(config)
    if video is not None and path is not None:
        content = read_regular(path) if path.stat().st_size <= MOST_INLINED_BYTES else b""
        source = f"data:{MEDIA[path.suffix]};base64,{base64.b64encode(content).decode()}"
        video = {**video, "source": source} if content else None
    return {**data, "video": video, "poll_seconds": 0}


def video_of(config: Config) -> Path | None:
    """Returns the newest video of the run; None if there is none."""
    path = Path(video_of_run(config.evaluator.video or "video", config.directory))
    videos = [path] if path.suffix in ENCODERS else [path.with_suffix(suffix) for suffix in ENCODERS]
    return next((video for video in videos if video.is_file() and not video.is_symlink()), None)


def _video(config: Config) -> dict[str, str] | None:
    if (path := video_of(config)) is None:
        return None
    modified = path.stat().st_mtime
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(modified))
    kind = MEDIA[path.suffix].partition("/")[0]
    return {"source": f"video?{modified}", "kind": kind, "caption": f"{path.name}, written {written}"}


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


def _frame_rate(curve: Curve, interval_minutes: float) -> Curve:
    """Returns the frames per second between the points of a curve, in steps of `interval_minutes` or more."""
    if not curve.minutes.size:
        return curve
    first, last = curve.minutes[[0, -1]]
    minutes = np.arange(first, last, max(interval_minutes, (last - first) / MOST_POINTS))
    frames = np.interp(minutes, curve.minutes, curve.frames)
    return Curve(frames[1:], minutes[1:], np.diff(frames) / np.diff(minutes) / 60)


def charts(
    starts: Sequence[Mapping[str, Any]],
    lines: Sequence[Mapping[str, Any]],
    interval_seconds: float,
    others: Mapping[str, Curve] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Returns the charts of a page. `interval_seconds`: between two lines of a process."""
    named = sorted({tag for line in lines for tag in line if tag.startswith(NAMED)})
    curves = curves_of(starts, lines, [*CURVES, *named])
    returns = {"evaluation": curves[EVALUATION], "training, exploring": curves[TRAINING], **others}
    loss, updates = curves[LOSS], curves[UPDATE_RATE]
    frames = _frame_rate(curves[REPLAY_SIZE], interval_seconds / 60)  # replay servers measure it
    loss = Curve(*(column[loss.returns > 0] for column in loss))  # the scale is logarithmic
    return [
        _chart("Return over time", "minutes", "return", returns),
        _chart("Return over experience", "frames", "return", returns),
        _chart("Loss of the learner", "minutes", "loss, logarithmic", {"": loss}, scale="log"),
        _chart("Speed of the actors", "minutes", "frames per second", {"": frames}, scale="zero"),
        _chart("Speed of the learner", "minutes", "updates per second", {"": updates}, scale="zero"),
        _chart("Q-values", "minutes", "mean of the replayed actions", {"": curves[Q_VALUES]}),
        _chart("Norm of the gradient", "minutes", "before clipping", {"": curves[GRADIENT]}, scale="zero"),
        _chart("Length of the games", "minutes", "agent steps, training", {"": curves[LENGTH]}, scale="zero"),
        *_named_charts(curves),
    ]


def _named_charts(curves: Mapping[str, Curve]) -> Iterator[dict[str, Any]]:
    """Yields the charts of the numbers of `metrics.info`, and of the metrics of an algorithm of one's own."""
    info = (TRAINING_INFO, EVALUATED_INFO)
    for name in sorted({tag.removeprefix(start) for tag in curves for start in info if tag.startswith(start)}):
        of_kind = {"evaluation": f"{EVALUATED_INFO}{name}", "training, exploring": f"{TRAINING_INFO}{name}"}
        series = {kind: curves[tag] for kind, tag in of_kind.items() if tag in curves}
        yield _chart(name, "minutes", "mean at the end of games", series)
    for tag in curves:
        if tag.startswith(OWN):
            yield _chart(tag.removeprefix(OWN), "minutes", "metric of the algorithm", {"": curves[tag]})


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


# The page of a fleet: what its processes report, each as a tile, and their metrics in the charts of a run -----------


class FleetPage:
    """Collects the reports of a fleet's processes, from the start of the command on."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], KeptLines] = {}  # by name and address
        self._newest: dict[tuple[str, str], Mapping[str, float]] = {}
        self._frames = 0.0  # of the run, by the newest report that has a count
        self.data: dict[str, Any] = {}

    def update(self, statuses: Sequence[ProcessStatus]) -> None:
        """Shows these from now on."""
        self._frames = max((status.frames for status in statuses), default=0) or self._frames
        for status in statuses:
            values, process = status.metrics, (status.name, status.address)
            if values and values != self._newest.get(process):  # a process writes them only at times
                self._newest[process] = values
                lines = self._lines.setdefault(process, KeptLines())
                step = values.get("eval/frames", self._frames)  # an evaluation is of older weights
                lines.add({**values, "time": time.time(), "step": step})
        wrong = [f"{status.name}: {problem}" for status in statuses for problem in status.problems]
        advice = [f"{status.name}: {warning}" for status in statuses for warning in status.warnings]
        kept = [line for lines in self._lines.values() for line in lines.lines]
        self.data = {
            "task": "Fleet",
            "phase": f"{len(wrong)} problem{'s' * (len(wrong) > 1)}" if wrong else "works",
            "share": None,
            "written": time.strftime("%Y-%m-%d %H:%M:%S"),
            "poll_seconds": POLL_SECONDS,
            "warnings": [*wrong, *advice],
            "tiles": [Record(status.name, *status.cells)._asdict() for status in statuses],
            "charts": charts([], kept, POLL_SECONDS),
            "facts": [[status.name, f"{status.address}  {_run_of(status)}"] for status in statuses],
            "settings": [],
            "video": None,
        }


def serve(ask: Callable[[], Sequence[ProcessStatus]], port: int) -> int:
    """Serves the page on this machine until SIGINT or SIGTERM; returns the exit code. Raises RunError."""
    page, stop = FleetPage(), StopSignal()
    stop.install()
    page.update(ask())
    fix = "choose another port, or 0 for any that is free"
    server, address = serve_page(port, "status: --page ", fix, lambda path: answer_of_page(path, lambda: page.data))
    print(f"Watch the fleet at {address}; Ctrl-C ends the page, not the fleet", flush=True)
    with contextlib.closing(server):
        while not stop.wait(POLL_SECONDS):
            page.update(ask())
    return stop.exit_code


def _run_of(status: ProcessStatus) -> str:
    return short_repr(status.content["run"]) if status.content is not None and "run" in status.content else ""
