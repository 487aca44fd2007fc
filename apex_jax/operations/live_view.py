"""The view of a local run: a panel in a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from apex_jax.config import Config
from apex_jax.config.load import code_settings
from apex_jax.host.program import shell_command
from apex_jax.operations.progress import EvaluationSummary, RunProgress
from apex_jax.operations.records import Record
from apex_jax.run.checkpoint_files import checkpoint_steps
from apex_jax.run.evaluations import return_text
from apex_jax.run.provenance import playing_arguments

PLAIN_INTERVAL_SECONDS = 10.0
PANEL_WIDTH = 100
SLOW_STEPS_PER_SECOND = 200.0  # below which steps are dearer than updates, as configs/slow.yaml takes them
SECONDS_TO_KNOW_THE_SPEED = 20.0  # from the start of a run: the first steps of a fast environment are slow, too


class LiveView:
    """Shows the progress on `stream`: a panel that stays in place in a terminal, plain lines elsewhere."""

    def __init__(
        self, config: Config, stream: TextIO, clock: Callable[[], float] = time.monotonic, page_address: str = ""
    ) -> None:
        """`page_address`: of the run's page, empty = none."""
        self._config = config
        self._page_address = page_address
        self._stream = stream
        self._clock = clock
        self._next_line = clock()
        self._evaluation: EvaluationSummary | None = None  # that has been printed
        self._printed: set[str] = set()  # kinds of the current warnings that have been printed as lines
        self._live: Live | None = None
        print(introduction(config), file=stream, flush=True)
        if page_address:
            print(f"Watch it at {page_address}", file=stream, flush=True)
        if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            console = Console(file=stream, force_terminal=True, markup=False, emoji=False, highlight=False)
            # Prints log lines above the panel, unless standard error is redirected to a file.
            self._live = Live(console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
            self._live.start()
            atexit.register(self.close)  # otherwise the cursor would stay hidden

    def update(self, progress: RunProgress) -> None:
        """Shows `progress`, about twice a second; without a terminal, each ten seconds, and each evaluation."""
        if self._live:
            self._live.update(_panel(self._config, progress, self._page_address), refresh=True)
            return
        if progress.latest_evaluation != self._evaluation:
            self._evaluation = progress.latest_evaluation
            print(f"evaluation: {_evaluations(progress, with_updates=True).text}", file=self._stream, flush=True)
        if self._clock() >= self._next_line:
            self._next_line = self._clock() + PLAIN_INTERVAL_SECONDS
            line = "; ".join(f"{record.name} {record.text}" for record in rows(self._config, progress))
            print(f"{progress.phase}: {line}", file=self._stream, flush=True)
            for warning in progress.warnings:
                if _kind(warning) not in self._printed:
                    print(f"warning: {warning}", file=self._stream, flush=True)
            self._printed = set(map(_kind, progress.warnings))

    def close(self) -> None:
        """Keeps the last panel on the screen and restores the terminal; a second call does nothing."""
        if self._live:
            self._live.stop()
            self._live = None
            atexit.unregister(self.close)


def introduction(config: Config) -> str:
    """Returns the first lines of a run: what it trains, when it ends, and where it saves."""
    limits = (
        (config.total_minutes, f"{config.total_minutes:g} minute{'s' * (config.total_minutes != 1)}"),
        (config.total_environment_frames, f"{config.total_environment_frames:,} frames"),
        (config.total_updates, f"{config.total_updates:,} updates"),
        (config.evaluator.stop_at_return, f"an evaluation with a return of {config.evaluator.stop_at_return:,g}"),
    )
    ends = [text for limit, text in limits if limit]
    end = f"ends after {' or '.join(ends)}" if ends else "runs until it is stopped with Ctrl-C"
    begin = f"Learning starts once the replay holds {config.replay.min_size_to_sample:,} transitions."
    if steps := checkpoint_steps(Path(config.directory, "checkpoints")):
        begin = f"It goes on after {max(steps):,} updates, once the replay is filled again."
    if config.processes == "one":
        begin += "\nAll in one process; processes=many starts one for each role."
    return (
        f"Training Ape-X on {config.environment.task} with {config.ladder_size} environments; it {end}.\n"
        f"{begin} Everything is saved in {config.directory}"
    )


def final_summary(progress: RunProgress, config: Config, can_render: bool) -> str:
    """Returns lines with the results of the run, the pictures that exist, and the commands to look at its games.

    `can_render`: whether the evaluator can record a game of this task.
    """

    run_directory = config.directory

    def present(*names: str) -> list[str]:
        return [name for name in names if Path(run_directory, name).exists()]

    reached = " and ".join(progress.reached_limits)
    lines = [
        f"Ran for {_duration(progress.elapsed_seconds)}: {progress.frames:,} frames, {progress.updates:,} updates",
        f"Evaluation:  {_evaluations(progress, with_updates=True).text}",
        *([f"Ended:       {reached} is reached"] if reached else []),
        *(f"Warning:     {warning}" for warning in progress.warnings),
        *([f"Video:       {progress.film}"] if progress.film else []),
    ]
    is_filmed = bool(config.evaluator.video or present("video.mp4", "video.gif"))
    is_not_filmed = can_render and bool(reached) and not is_filmed
    lines += ["Video:       none; the log says why"] if is_not_filmed else []
    pictures = present("report.html", "curves.png", "video.mp4", "video.gif")
    lines += [f"Look at:     {shlex.quote(os.path.join(run_directory, name))}" for name in pictures]
    lines.append(f"Files:       {shlex.quote(run_directory)}")
    if not checkpoint_steps(Path(run_directory, "checkpoints")):
        lines.append("Checkpoint:  none was saved: the same command starts from the beginning")
        return "\n".join(lines)
    if not reached:
        lines.append("Go on:       the same command resumes the run")
    program = _program(config)
    play = f"{program} {playing_arguments(run_directory, config)}"
    lines.append(f"Play again:  {play} episodes=100")
    if progress.best_evaluation != progress.latest_evaluation and present("best"):
        best = playing_arguments(os.path.join(run_directory, "best"), config)
        lines.append(f"Play best:   {program} {best} episodes=100")
    if can_render and not is_not_filmed:
        video = shlex.quote(os.path.join(run_directory, "game"))
        lines.append(f"Record:      {play} episodes=1 video={video}")
    elif progress.film is not None:
        lines.append(f"Record:      {program} {playing_arguments(run_directory, config, 'film ')}")
    return "\n".join(lines)


def finished_summary(progress: RunProgress, run_directory: str, changed_settings: Sequence[str] = ()) -> str:
    """Returns a line about a finished run that was started again, and one about changed settings, which had no use."""
    limits = progress.reached_limits
    keys = " and ".join(limit.partition("=")[0] for limit in limits)
    changed = f"\nNot used:    {', '.join(changed_settings)}; for a run with it, give another run_directory"
    return (
        f"Finished:    {shlex.quote(run_directory)} has reached {' and '.join(limits)},"
        f" with {progress.updates:,} updates and {progress.frames:,} frames; evaluation {_evaluations(progress).text}."
        f" Nothing was started: raise {keys} to go on{changed if changed_settings else ''}"
    )


def _program(config: Config) -> str:
    """Returns what to type to start this program, and to find the user's code that the run names."""
    path = os.environ.get("PYTHONPATH", "") if code_settings(config) else ""
    return f"PYTHONPATH={shlex.quote(path)} {shell_command(_python())}" if path else shell_command(_python())


def _python() -> str:
    """Returns how the user calls this interpreter: by its path if that is below the working directory (.venv)."""
    path = os.path.relpath(sys.executable)
    return "python" if path.startswith(os.pardir) else shlex.quote(path)


def _panel(config: Config, progress: RunProgress, page_address: str) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for record in rows(config, progress):
        table.add_row(record.name, record.text)
    return Panel(  # a narrower terminal makes it narrower
        Group(table, *(Text(f"warning: {warning}", style="yellow") for warning in progress.warnings)),
        title=Text(f"{config.environment.task}: {progress.phase}", style="bold"),
        title_align="left",
        subtitle=Text(page_address) if page_address else None,
        subtitle_align="right",
        width=PANEL_WIDTH,
    )


def rows(config: Config, progress: RunProgress) -> list[Record]:
    """Returns what the view and the page of a run show of its progress."""
    total = f"of {config.total_environment_frames:,}" if config.total_environment_frames else ""
    target = f"{config.replay.samples_per_insert:g}" if config.replay.samples_per_insert else "none"
    return [
        Record("time", _duration(progress.elapsed_seconds), detail=_time_left(progress)),
        Record("frames", f"{progress.frames:,}", total, f"{progress.frames_per_second:,.0f} per second"),
        Record("updates", f"{progress.updates:,}", "", f"{progress.updates_per_second:,.1f} per second"),
        _replay(config, progress),
        Record("samples per insert", f"{progress.samples_per_insert:.2f}", f"(target: {target})"),
        Record("training return", _number(progress.training_return), "(exploring)"),
        _evaluations(progress),
        *([Record("processes", _roles(progress.roles))] if progress.roles else []),
        Record("memory", f"{progress.memory_bytes / 2**30:.2f}", "GiB"),
    ]


def _kind(warning: str) -> str:
    """Returns a warning without its numbers, which change while the problem stays the same."""
    return re.sub(r"\d[\d.,]*", "", warning)


def _time_left(progress: RunProgress) -> str:
    if progress.seconds_left is None or progress.phase == "finishing":
        return ""
    return f"about {_duration(progress.seconds_left)} left" if progress.seconds_left >= 1 else "about to finish"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


def _number(value: float | None) -> str:
    return "none yet" if value is None else return_text(value, ",")


def _replay(config: Config, progress: RunProgress) -> Record:
    size, least = progress.replay_size, config.replay.min_size_to_sample
    if size >= least:
        return Record("replay", f"{size:,}", f"of {config.replay.capacity_transitions:,} transitions")
    speed = progress.frames_per_second / config.environment.frame_skip
    updates_per_step = config.replay.samples_per_insert / config.learner.batch_size
    is_slow = speed < SLOW_STEPS_PER_SECOND and progress.elapsed_seconds > SECONDS_TO_KNOW_THE_SPEED
    can_be_slow = not config.network.channels and 0 < updates_per_step < 1
    sooner = "--config slow" if is_slow and can_be_slow else "replay.min_size_to_sample"
    when = f"in about {_duration((least - size) / speed)}; sooner: {sooner}" if speed else ""
    return Record("replay", f"{size:,}", f"of the {least:,} needed to start ({size / least:.0%})", when)


def _evaluations(progress: RunProgress, with_updates: bool = False) -> Record:
    latest, best = progress.latest_evaluation, progress.best_evaluation
    if latest is None or best is None:
        return Record("evaluation", "none yet")
    of_best = f"best {_number(best.episode_return)} {_conditions(best, with_updates)}".rstrip()
    return Record("evaluation", _number(latest.episode_return), _conditions(latest, with_updates), of_best)


def _conditions(evaluation: EvaluationSummary, with_updates: bool) -> str:
    human, updates = evaluation.human_normalized, evaluation.updates
    of_human = "" if human is None else f"({human:z.0%} of human)"
    after = f"after {updates:,} updates" if with_updates and updates is not None else ""
    return f"{of_human} {after}".strip()


def _roles(roles: Mapping[str, str]) -> str:
    """Returns the processes by state, those that are not running first, because a line may be cut at its end."""
    by_state: dict[str, list[str]] = {}
    for name, state in roles.items():
        by_state.setdefault(state, []).append(name)
    states = sorted(by_state, key=lambda state: state == "running")
    return "; ".join(f"{state}: {_names(by_state[state])}" for state in states)


def _names(names: list[str]) -> str:
    actors = [name for name in names if name.startswith("actor-")]
    others = [name for name in names if name not in actors]
    return ", ".join([*others, f"{len(actors)} actors"] if len(actors) > 2 else names)
