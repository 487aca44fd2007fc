"""What a run leaves to look at: its curves, and a game as a person would see it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from apex_jax.config import Config
from apex_jax.environment import has_screen
from apex_jax.errors import UsageError, shown
from apex_jax.plotting.video import video_paths, video_writer

_log = logging.getLogger(__name__)

EMULATOR_FRAMES_PER_SECOND = 60
COMPLETING_THE_FILM = "completing the film"  # phase in an evaluator's report, after its last evaluation
VIDEO_ERRORS = (OSError, UsageError, av.FFmpegError)


def check_video(config: Config) -> None:
    """Raises UsageError if the video that is asked for has a name that no video can have, or its game no screen."""
    video = config.evaluator.video
    if not video:
        return
    video_paths(video)
    if not has_screen(config):
        raise UsageError(f"evaluator.video={shown(video)}: {config.environment.task} has no screen; leave it out")


def draw_curves(run_directory: Path, task: str) -> None:
    """Draws the run's metrics to `curves.png` in its directory. An error is logged: a picture is no reason to fail."""
    try:
        from apex_jax.plotting import curves, plot  # not at the top: matplotlib takes a second

        run = dataclasses.replace(curves.read_run(run_directory), task=task)
        if not any(curve.returns.size for curve in (run.evaluation, *run.training.values())):
            _log.info("no curves.png: no game has ended yet")
            return
        plot.draw_run(run, run_directory / "curves.png")
    except Exception as error:  # also errors of matplotlib about the disk or a file
        _log.warning("no curves.png: %s", error)


class Film:
    """The video of a game, written while the game is played. An error of the video ends the film and not the game."""

    def __init__(self, path: str, frame_skip: int):
        """`path`: see `video_writer`. Nothing is written before the first screen is added."""
        self.error: Exception | None = None
        self.paths: list[Path] = []  # of the finished film
        self._path = path
        self._frames_per_second = Fraction(EMULATOR_FRAMES_PER_SECOND, frame_skip)
        self._writer = contextlib.ExitStack()
        self._encode: Callable[[np.ndarray], None] | None = None

    def __enter__(self) -> Film:
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves no file of a film that was not finished."""
        if self._encode is not None:
            self._abandon()

    def add(self, screen: np.ndarray | None) -> None:
        """Appends a screen, uint8[height, width, 3]; None, of a game without one, is ignored."""
        if screen is None or self.error is not None:
            return
        try:
            if self._encode is None:
                self._encode = self._writer.enter_context(video_writer(self._path, self._frames_per_second))
            self._encode(screen)
        except VIDEO_ERRORS as error:
            self.error = error
            self._abandon()

    def finish(self) -> None:
        """Completes the files; `paths` are those written, none if no screen was added."""
        if self._encode is None:
            return
        self._encode = None
        try:
            self._writer.close()
            self.paths = video_paths(self._path)
        except VIDEO_ERRORS as error:
            self.error = error

    def _abandon(self) -> None:
        """Ends the writer by an error, so that no fragment takes the place of a whole video."""
        self._encode = None
        with contextlib.suppress(_AbandonedError, *VIDEO_ERRORS), self._writer:
            raise _AbandonedError


class _AbandonedError(Exception):
    pass
