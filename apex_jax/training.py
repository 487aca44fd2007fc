"""Training from Python: in a notebook, a test, a sweep.

import apex_jax

run = apex_jax.train("cartpole", seed=3, learner={"learning_rate": 1e-3}, run_directory="runs/trial-3")
print(run.evaluations[-1].returns.mean(), run.policy([0.0, 0.0, 0.1, 0.0]))
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from apex_jax.config import Config
from apex_jax.config.load import (
    DEFAULT_CONFIG,
    code_settings,
    config_file,
    config_path,
    is_file,
    load_run,
    load_with,
    parse_settings,
)
from apex_jax.device import check_device, choose_device, keep_compiled_programs
from apex_jax.environments.preset import preset_of
from apex_jax.host.errors import RunError, UsageError
from apex_jax.operations.progress import RunProgress
from apex_jax.policy import Policy, load_policy
from apex_jax.process import StopSignal
from apex_jax.run.evaluations import Evaluation, read_evaluations, return_text
from apex_jax.run.provenance import check_resumable
from apex_jax.workers import local, one_process

POLL_SECONDS = 0.5  # between two looks at the evaluations of a run of many processes
_TASK = re.compile(r"[^:\s]+-v[0-9]+|[^:\s]+:\S+")
_training = threading.Lock()  # compiled programs, loggers and the log are those of the process


Callback: TypeAlias = Callable[[Evaluation], bool | None]
"""Is called after each evaluation, and ends the run if it returns True; an exception ends it, too."""


@dataclass(frozen=True, repr=False)
class Run:
    """The evaluations and the policy of a run, read from its directory."""

    config: Config
    evaluations: tuple[Evaluation, ...]  # oldest first, those of earlier starts included

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r}, {len(self.evaluations)} evaluations)"

    @property
    def directory(self) -> Path:
        """The run directory, as `python main.py plot` and `--role evaluator checkpoint=` take it."""
        return Path(self.config.directory)

    @property
    def policy(self) -> Policy:
        """The trained agent, as `apex_jax.load_policy` returns it."""
        code = [f"{key}={value}" for key, value in code_settings(self.config).items()]
        return load_policy(self.directory, code=code)


def train(
    config: str | os.PathLike[str] | None = None,
    *,
    callback: Callback | None = None,
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Trains until a limit of the run is reached, and returns the run.

        run = apex_jax.train("gymnasium:CartPole-v1", seed=2, learner={"learning_rate": 1e-3})
        run.evaluations[-1].mean           # of the last evaluation's returns; .returns has each, .updates when it was
        run.directory                      # checkpoints, metrics, film; `apex-jax plot` draws it
        run.config                         # every setting
        action = run.policy(observation)   # the agent, as apex_jax.load_policy(run.directory) returns it

    `config`: a YAML file, one of configs/ such as "cartpole", or a task such as "gymnasium:my_file:MyEnv", for which it
    is chosen by observations and actions; None: for `environment`'s task, or Pong; `callback`: see `Callback`;
    `progress`: whether a bar is shown; `settings`: as on the command line, those of a group as a mapping:
    `learner={"batch_size": 64}`.

    The run uses only this process, unless `processes="many"` asks for one for each role. Any thread may call it, one at
    a time. A run directory that has been trained before is resumed, so that a new trial needs its own `run_directory`.
    An exception of the callback, and Ctrl-C ("interrupt kernel"), are raised once the run is saved; the same call goes
    on. Raises UsageError and RunError, with a message of one line.
    """
    if not _training.acquire(blocking=False):
        raise UsageError("apex_jax.train is running in this process already: wait for it, or start another process")
    try:
        return _train(config, callback, progress, settings)
    finally:
        _training.release()


def _train(
    config: str | os.PathLike[str] | None, callback: Callback | None, progress: bool, settings: dict[str, Any]
) -> Run:
    given = parse_settings({"processes": "one", "page_port": -1, **settings})
    stop, failed = StopSignal(), list[BaseException]()
    with _system_errors_in_a_line(), _interrupt_stops(stop):
        checked, why = _checked(None if config is None else os.fspath(config), given)
        if why and progress:
            print(why, flush=True)
        check_resumable(checked)
        role = "one_process" if checked.processes == "one" else "local"
        choose_device(role, checked)
        keep_compiled_programs()
        check_device(role, checked)
        if role == "one_process":
            with _view(checked, progress) as view:
                one_process.train(checked, local.check_local(checked), stop, view, _kept_for_later(callback, failed))
        else:
            with _following(checked, callback, stop, failed):
                local.run(checked, "local", stop)
    if failed:
        raise failed[0]
    if config_path(checked.directory).is_file():  # of a run that had been finished before: its own settings
        checked = load_run(checked.directory).replace(run_directory=checked.directory)
    return Run(checked, tuple(read_evaluations(checked.directory)))


def _checked(config: str | None, given: dict[str, Any]) -> tuple[Config, str]:
    """Returns the configuration that is named, or chosen for a task, and a line that says which was chosen."""
    if config is not None and _TASK.fullmatch(config) and not is_file(config_file(config)):
        if given.setdefault("environment.task", config) != config:
            raise UsageError(f"environment.task={given['environment.task']}: {config} is given, too; leave one out")
        config = None
    if config is not None or "environment.task" not in given:
        return load_with(DEFAULT_CONFIG if config is None else config_file(config), given), ""
    preset = preset_of(given)
    return load_with(config_file(preset.config), {**preset.settings, **given}), preset.why


def _kept_for_later(callback: Callback | None, failed: list[BaseException]) -> Callback:
    """Returns a callback whose exception ends the run, which is saved then, and is added to `failed`."""

    def call(games: Evaluation) -> bool | None:
        try:
            return callback(games) if callback else None
        except BaseException as error:  # Ctrl-C, too
            failed.append(error)
            return True

    return call


@contextlib.contextmanager
def _system_errors_in_a_line() -> Iterator[None]:
    """Raises RunError for a full disk, missing permissions and the like."""
    try:
        yield
    except OSError as error:
        raise RunError(str(error)) from error


@contextlib.contextmanager
def _interrupt_stops(stop: StopSignal) -> Iterator[None]:
    """Lets Ctrl-C stop the training at its next step, and raises KeyboardInterrupt once it has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if stop.signal_number:  # the second one
            raise KeyboardInterrupt
        stop.signal_number = number

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if stop.signal_number:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _view(config: Config, shown: bool) -> Iterator[Callable[[RunProgress], None]]:
    """Yields a function that shows the progress as a bar, also in a notebook."""
    columns = (
        TextColumn(Path(config.directory).name),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, disable=not shown) as bar:
        task = bar.add_task("", total=None)

        def update(progress: RunProgress) -> None:
            best = progress.best_evaluation
            returned = "" if best is None else f"; best {return_text(best.episode_return)}"
            total = None if progress.share is None else 1.0
            text = f"{progress.phase}; {progress.updates:,} updates{returned}"
            bar.update(task, total=total, completed=progress.share or 0.0, description=text)

        yield update


@contextlib.contextmanager
def _following(
    config: Config, callback: Callback | None, stop: StopSignal, failed: list[BaseException]
) -> Iterator[None]:
    """Calls back for each evaluation that the evaluator's process writes, on a thread; `failed`: its exceptions."""
    ended = threading.Event()
    known = len(read_evaluations(config.directory))

    def look(callback: Callback, known: int) -> int:
        evaluations = read_evaluations(config.directory)[known:]
        for evaluation in evaluations:
            if callback(evaluation):
                stop.set()
        return known + len(evaluations)

    def follow(callback: Callback, known: int) -> None:
        try:
            while not ended.wait(POLL_SECONDS):
                known = look(callback, known)
            look(callback, known)
        except Exception as error:  # of the user's code
            failed.append(error)
            stop.set()

    thread = threading.Thread(target=follow, args=(callback, known)) if callback else None
    if thread is not None:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread is not None:
            thread.join()
