"""What a person sees of a local run: a panel in a terminal, a line now and then elsewhere, and a summary at the end."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from apex_jax.config import Config
from apex_jax.metrics import MetricsFollower

PLAIN_INTERVAL_SECONDS = 10.0


class Evaluation(NamedTuple):
    """Result of the evaluator."""

    episode_return: float
    human_normalized: float | None  # as a fraction; None for games without a human score


@dataclass(frozen=True)
class Progress:
    """State of a run at one moment."""

    phase: str  # "starting", "filling the replay", "learning" or "finishing"
    elapsed_seconds: float
    frames: int  # emulator frames of the whole run
    total_frames: int  # 0 = no limit
    frames_per_second: float
    updates: int
    updates_per_second: float
    replay_size: int  # transitions
    replay_capacity: int
    min_size_to_sample: int
    samples_per_insert: float
    target_samples_per_insert: float  # 0 = free
    training_return: float | None  # mean of the actors' last games, all epsilons
    latest_evaluation: Evaluation | None
    best_evaluation: Evaluation | None
    seconds_left: float | None  # to the first of the run's limits
    roles: Mapping[str, str]  # name of a process -> short state
    memory_bytes: int  # of all processes


@dataclass
class _Role:
    """What one process has written since the reader was made."""

    follower: MetricsFollower
    last: dict[str, Any] | None = None
    memory_bytes: float = 0.0
    restarts: int = 0

    @property
    def state(self) -> str:
        """Short state, as far as the metrics show it."""
        if self.last is None:
            return "starting"
        return f"restarted {self.restarts}x" if self.restarts else "running"


class ProgressReader:
    """Follows the metrics of all processes of a local run.

    Make it before the processes start: what the files hold by then is history of an earlier start, from which only
    frames, updates and evaluations count on.
    """

    def __init__(self, run_directory: str, config: Config, clock: Callable[[], float] = time.time) -> None:
        names = ["learner", "replay", *(f"actor-{i}" for i in range(config.actor.processes)), "evaluator"]
        paths = {name: Path(run_directory, "metrics", f"{name}.jsonl") for name in names}
        self._roles = {name: _Role(MetricsFollower(path)) for name, path in paths.items()}
        self._config = config
        self._clock = clock  # unix seconds, as in the files
        self._started = clock()
        self._values: dict[str, tuple[float, float]] = {}  # tag -> time, newest value of any process
        self._learning = False
        self._evaluations: list[Evaluation] = []
        self._past_frames = 0  # reached by earlier starts of the run
        self._past_updates = 0
        self._read_history()

    def read(self) -> Progress:
        """Returns the progress as of now."""
        for role in self._roles.values():
            for line in role.follower.read_new():
                self._take(role, line)
        frames, updates = self._frames(), int(self._value("learner/updates", self._past_updates))
        replay = self._config.replay
        training_return = self._values.get("charts/episodic_return")
        return Progress(
            phase=self._phase(frames, updates),
            elapsed_seconds=self._clock() - self._started,
            frames=frames,
            total_frames=self._config.total_environment_frames,
            frames_per_second=self._value("charts/environment_frames_per_second"),
            updates=updates,
            updates_per_second=self._value("charts/updates_per_second"),
            replay_size=int(self._value("replay/size_transitions")),
            replay_capacity=replay.capacity_transitions,
            min_size_to_sample=replay.min_size_to_sample,
            samples_per_insert=self._value("replay/samples_per_insert"),
            target_samples_per_insert=replay.samples_per_insert,
            training_return=training_return[1] if training_return else None,
            latest_evaluation=self._evaluations[-1] if self._evaluations else None,
            best_evaluation=max(self._evaluations, default=None, key=lambda evaluation: evaluation.episode_return),
            seconds_left=self._seconds_left(frames, updates),
            roles={name: role.state for name, role in self._roles.items()},
            memory_bytes=int(sum(role.memory_bytes for role in self._roles.values())),
        )

    def _read_history(self) -> None:
        for name, role in self._roles.items():
            for line in role.follower.read_new():
                self._evaluations += _evaluation_of(line)
                if name == "learner":
                    self._past_frames = line["step"]
                    self._past_updates = int(line.get("learner/updates") or self._past_updates)

    def _take(self, role: _Role, line: dict[str, Any]) -> None:
        if role.last is not None and line["seconds"] < role.last["seconds"]:
            role.restarts += 1
        role.last = line
        role.memory_bytes = line.get("system/resident_memory_bytes") or role.memory_bytes
        self._evaluations += _evaluation_of(line)
        self._learning |= bool(line.get("charts/updates_per_second"))
        for tag, value in line.items():
            if value is not None and line["time"] >= self._values.get(tag, (0.0, 0.0))[0]:
                self._values[tag] = (line["time"], value)

    def _value(self, tag: str, default: float = 0.0) -> float:
        return self._values.get(tag, (0.0, default))[1]

    def _frames(self) -> int:
        """The learner's count, and the replay server's while the learner, for want of batches, hears of no frames."""
        lines = (self._roles[name].last for name in ("learner", "replay"))
        return max((line["step"] for line in lines if line), default=0) or self._past_frames

    def _learner_seconds(self) -> float:
        """Time that counts towards `total_minutes`: the learner's own count, and what has passed since it wrote it."""
        line = self._roles["learner"].last
        return self._value("charts/elapsed_minutes") * 60 + (self._clock() - line["time"] if line else 0.0)

    def _phase(self, frames: int, updates: int) -> str:
        config = self._config
        limits = (
            (config.total_environment_frames, frames),
            (config.total_updates, updates),
            (config.total_minutes, self._learner_seconds() / 60),
        )
        if any(0 < limit <= reached for limit, reached in limits):
            return "finishing"
        if self._learning:
            return "learning"
        return "filling the replay" if self._roles["replay"].last else "starting"

    def _seconds_left(self, frames: int, updates: int) -> float | None:
        """Time to the limit that comes first; a limit whose rate is not known yet is left out."""
        config, left = self._config, []
        if config.total_minutes:
            left.append(config.total_minutes * 60 - self._learner_seconds())
        frames_per_second = self._value("charts/environment_frames_per_second")
        if config.total_environment_frames and frames_per_second > 0:
            left.append((config.total_environment_frames - frames) / frames_per_second)
        updates_per_second = self._value("charts/updates_per_second")
        if config.total_updates and updates_per_second > 0:
            left.append((config.total_updates - updates) / updates_per_second)
        return max(0.0, min(left)) if left else None


def _evaluation_of(line: dict[str, Any]) -> list[Evaluation]:
    episode_return = line.get("eval/episodic_return")
    return [] if episode_return is None else [Evaluation(episode_return, line.get("eval/human_normalized_score"))]


class LiveView:
    """Shows the progress on `stream`: a panel that stays in place in a terminal, plain lines elsewhere."""

    def __init__(self, config: Config, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._stream = stream
        self._clock = clock
        self._next_line = clock()
        self._live: Live | None = None
        print(introduction(config), file=stream, flush=True)
        if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            console = Console(file=stream, force_terminal=True, markup=False, emoji=False, highlight=False)
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()
            atexit.register(self.close)  # a cursor that stays hidden is a broken terminal

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, progress: Progress) -> None:
        """Shows `progress`; call it about twice a second. Without a terminal one call in ten seconds prints a line."""
        if self._live:
            self._live.update(_panel(self._config.environment.task, progress), refresh=True)
        elif self._clock() >= self._next_line:
            self._next_line = self._clock() + PLAIN_INTERVAL_SECONDS
            print(_line(progress), file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the last panel standing and gives the terminal back; a second call does nothing."""
        if self._live:
            self._live.stop()
            self._live = None
            atexit.unregister(self.close)


def introduction(config: Config) -> str:
    """Returns what is about to happen, how long it will take and where it goes."""
    limits = (
        (config.total_minutes, f"{config.total_minutes:g} minutes"),
        (config.total_environment_frames, f"{config.total_environment_frames:,} frames"),
        (config.total_updates, f"{config.total_updates:,} updates"),
    )
    ends = [text for limit, text in limits if limit]
    if ends:
        end = "ends after " + " or ".join(ends) + (", whichever comes first" if len(ends) > 1 else "")
    else:
        end = "goes on until it is stopped with Ctrl-C"
    return (
        f"Ape-X learns {config.environment.task} with {config.ladder_size} environments, and {end}.\n"
        f"Learning starts at {config.replay.min_size_to_sample:,} transitions in the replay."
        f" Everything is kept in {config.directory}"
    )


def final_summary(progress: Progress, run_directory: str) -> str:
    """Returns what came out of the run, where it is, and how to look at it."""
    directory = shlex.quote(run_directory)
    charts, config = (shlex.quote(os.path.join(run_directory, name)) for name in ("tensorboard", "config.yaml"))
    return "\n".join(
        (
            f"Ran for {_duration(progress.elapsed_seconds)}:"
            f" {progress.frames:,} frames and {progress.updates:,} updates in all",
            f"Evaluation:  {_evaluations(progress)}",
            f"Files:       {directory} (checkpoints, metrics)",
            f"Charts:      tensorboard --logdir {charts}   (pip install tensorboard, once)",
            f"Play again:  {_python()} main.py --role evaluator --config {config} evaluator.checkpoint={directory}",
        )
    )


def _python() -> str:
    """Returns how the user calls this interpreter: by its path where that is below the working directory (.venv)."""
    path = os.path.relpath(sys.executable)
    return "python" if path.startswith(os.pardir) else shlex.quote(path)


def _panel(task: str, progress: Progress) -> Panel:
    table = Table.grid(padding=(0, 2))
    rows = _rows(progress)
    table.add_column(style="bold", no_wrap=True, min_width=max(len(name) for name, _ in rows))
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, text in rows:
        table.add_row(name, text)
    title = Text(f"{task}: {progress.phase}", style="bold")
    return Panel(table, title=title, title_align="left", width=100)  # a narrower terminal makes it narrower


def _rows(progress: Progress) -> list[tuple[str, str]]:
    total = f" of {progress.total_frames:,}" if progress.total_frames else ""
    return [
        ("time", _time(progress)),
        ("frames", f"{progress.frames:,}{total}, {progress.frames_per_second:,.0f} per second"),
        ("updates", f"{progress.updates:,}, {progress.updates_per_second:,.1f} per second"),
        ("replay", _replay(progress)),
        ("samples per insert", _samples_per_insert(progress)),
        ("training return", _number(progress.training_return) + " (exploring, all epsilons)"),
        ("evaluation", _evaluations(progress)),
        ("processes", _roles(progress.roles)),
        ("memory", f"{progress.memory_bytes / 2**30:.2f} GiB"),
    ]


def _line(progress: Progress) -> str:
    return ", ".join(
        (
            f"{progress.phase}: {_time(progress)}",
            f"{progress.frames:,} frames ({progress.frames_per_second:,.0f}/s)",
            f"{progress.updates:,} updates ({progress.updates_per_second:,.1f}/s)",
            f"replay {_replay(progress)}",
            f"training return {_number(progress.training_return)}",
            f"evaluation {_evaluations(progress)}",
            *(f"{name} {state}" for name, state in progress.roles.items() if state not in ("running", "starting")),
        )
    )


def _time(progress: Progress) -> str:
    left = "" if progress.seconds_left is None else f", about {_duration(progress.seconds_left)} left"
    return _duration(progress.elapsed_seconds) + left


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


def _number(value: float | None) -> str:
    return "none yet" if value is None else f"{value:,.1f}"


def _replay(progress: Progress) -> str:
    if progress.replay_size < progress.min_size_to_sample:
        share = progress.replay_size / progress.min_size_to_sample
        return f"{progress.replay_size:,} of the {progress.min_size_to_sample:,} to begin with ({share:.0%})"
    return f"{progress.replay_size:,} of {progress.replay_capacity:,} transitions"


def _samples_per_insert(progress: Progress) -> str:
    target = f"{progress.target_samples_per_insert:g}" if progress.target_samples_per_insert else "free"
    return f"{progress.samples_per_insert:.2f} (target: {target})"


def _evaluations(progress: Progress) -> str:
    if progress.latest_evaluation is None or progress.best_evaluation is None:
        return "none yet"
    return f"{_evaluation(progress.latest_evaluation)}, best {_evaluation(progress.best_evaluation)}"


def _evaluation(evaluation: Evaluation) -> str:
    human = evaluation.human_normalized
    return f"{evaluation.episode_return:,.1f}" + ("" if human is None else f" ({human:.0%} of human)")


def _roles(roles: Mapping[str, str]) -> str:
    """Names the processes in each state; what is not simply running comes first, for a line may be cut at its end."""
    by_state: dict[str, list[str]] = {}
    for name, state in roles.items():
        by_state.setdefault(state, []).append(name)
    states = sorted(by_state, key=lambda state: state == "running")
    return "; ".join(f"{state}: {_names(by_state[state])}" for state in states)


def _names(names: list[str]) -> str:
    actors = [name for name in names if name.startswith("actor-")]
    others = [name for name in names if name not in actors]
    return ", ".join([*others, f"{len(actors)} actors"] if len(actors) > 2 else names)
