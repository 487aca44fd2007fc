"""The pictures of a run: its learning curves, and the video of a game."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import shlex
import subprocess
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np

from apex_jax.config import Config
from apex_jax.environments.environment import can_render, has_reference_simulator
from apex_jax.host.errors import RunError, UsageError, printable, short_repr
from apex_jax.host.program import NAME, command
from apex_jax.plotting.video import video_paths, video_writer
from apex_jax.process import StopSignal
from apex_jax.run.evaluations import return_text
from apex_jax.run.provenance import playing_arguments
from apex_jax.types import EnvironmentSpec
from apex_jax.workers.film_command import FILM_EXTRA

_log = logging.getLogger(__name__)

EMULATOR_FRAMES_PER_SECOND = 60
CLASSIC_FRAMES_PER_SECOND = 30  # of Gymnasium's classic control tasks, at which they are commonly shown
FILM_SECONDS = 300.0  # for an episode in the task's own simulator
VIDEO_ERRORS = (OSError, RunError, UsageError)


def check_video(config: Config, environment_spec: EnvironmentSpec) -> None:
    """Raises UsageError if a video is requested under an invalid name or for a game without a screen."""
    video = config.evaluator.video
    if not video:
        return
    video_paths(video)
    if not can_render(config, environment_spec):
        raise UsageError(f"evaluator.video={short_repr(video)}: {no_screen(config)}; leave it out")


def no_screen(config: Config) -> str:
    """Returns why no game of the task can be filmed."""
    task = config.environment.task
    if has_reference_simulator(config):
        return f"EnvPool shows no screen of {task}, but `{NAME} film RUN` plays it in its own simulator"
    is_of_class = config.environment.is_gymnasium or config.environment.is_vector
    why = ': its metadata["render_modes"] does not name rgb_array' if is_of_class else ""
    return f"{task} has no screen{why}"


def draw_curves(run_directory: Path, task: str) -> None:
    """Draws the run's metrics to `curves.png` in its directory. Logs errors instead of raising them."""
    try:
        from apex_jax.plotting import curves, plot  # imported here: matplotlib takes 1 s

        run = dataclasses.replace(curves.read_run(run_directory), task=task)
        if not any(curve.returns.size for curve in (run.evaluation, *run.training.values())):
            _log.info("no curves.png: no game has ended yet")
            return
        plot.draw_run(run, run_directory / "curves.png")
    except Exception as error:  # including matplotlib's errors about the disk or a file
        _log.warning("no curves.png: %s", error)


class Film:
    """The video of a game, written while the game is played. A video error ends the film, not the game."""

    def __init__(self, config: Config, environment_spec: EnvironmentSpec):
        """The files are created when the first screen is added; their default is `video` in the run directory."""
        self.paths: list[Path] = []  # of the complete film
        self._path = config.evaluator.video or str(Path(config.directory, "video"))
        self._error: Exception | None = None
        self._config, self._environment_spec = config, environment_spec
        self._writer = contextlib.ExitStack()
        self._encode: Callable[[np.ndarray], None] | None = None

    def __enter__(self) -> Film:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the writer of an unfinished film with an error, so that a fragment does not replace a complete video."""
        with contextlib.suppress(_UnfinishedError, *VIDEO_ERRORS), self._writer:
            raise _UnfinishedError

    def add(self, screen: np.ndarray | None) -> None:
        """Appends a screen, uint8[height, width, 3]; ignores None, from a game without a screen."""
        if screen is None or self._error is not None:
            return
        try:
            if self._encode is None:
                self._encode = self._writer.enter_context(video_writer(self._path, self._frames_per_second))
            self._encode(screen)
        except VIDEO_ERRORS as error:
            self._error = error

    def complete(self, game_return: float) -> None:
        """Completes the files; `game_return`: of the game. Raises RunError if there is no film."""
        config = self._config
        if self._encode is not None and self._error is None:
            try:
                self._writer.close()
                self.paths = video_paths(self._path)
            except VIDEO_ERRORS as error:
                self._error = error
        if self._error is not None:
            raise RunError(f"{short_repr(self._path)} is not written: {self._error}")
        if not self.paths:
            failed = f"{config.environment.task}: its render returned no uint8[height, width, 3]"
            raise RunError(failed if can_render(config, self._environment_spec) else no_screen(config))
        files = " and ".join(map(str, self.paths))
        _log.info("recorded the first of these games, with a return of %s: %s", return_text(game_return), files)

    @property
    def _frames_per_second(self) -> Fraction:
        """How many screens of `VectorEnvironment.render` show one second."""
        if self._config.environment.is_atari:
            return Fraction(EMULATOR_FRAMES_PER_SECOND, self._config.environment.frame_skip)
        rate = self._environment_spec.frames_per_second or CLASSIC_FRAMES_PER_SECOND
        return Fraction(rate).limit_denominator(1000)


class _UnfinishedError(Exception):
    pass


def film_in_simulator(config: Config, stop: StopSignal) -> str | None:
    """Films the run's newest checkpoint by the command film, at the end of the run; returns one line about that.

    Empty if the process is stopped; None if the task has no simulator of its own.
    """
    if not has_reference_simulator(config):
        return None
    if importlib.util.find_spec("mujoco") is None:
        return f"none; it needs {FILM_EXTRA}"
    log, until = Path(config.directory, "logs", "film.log"), time.monotonic() + FILM_SECONDS
    log.parent.mkdir(exist_ok=True)
    arguments = shlex.split(playing_arguments(config.directory, config, "film "))
    with open(log, "wb") as file:
        process = subprocess.Popen([*command(), *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        while process.poll() is None and time.monotonic() < until and not stop.wait(0.1):
            stop.beat()
        process.kill()
        code = process.wait()
    if stop.is_set():
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("return ", "error: "))]
    text = lines[-1] if lines else f"the command film ended with exit code {code}, see {log}"
    return printable(text if code == 0 else f"none; {text.removeprefix('error: ')}")
