"""What a run leaves to look at: its curves, and a game as a person would see it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np

from apex_jax.agent.dqn import Dqn, Params
from apex_jax.config import Config
from apex_jax.environment import Environment, EpisodeTracker
from apex_jax.process import ROLE_NUMBERS, process_rng
from apex_jax.results.video import video_writer
from apex_jax.types import SegmentSpec

_log = logging.getLogger(__name__)

EMULATOR_FRAMES_PER_SECOND = 60


def draw_curves(run_directory: Path, task: str) -> None:
    """Draws the run's metrics to `curves.png` in its directory. An error is logged: a picture is no reason to fail."""
    try:
        from apex_jax.results import curves, plot  # not at the top: matplotlib takes a second

        run = dataclasses.replace(curves.read_run(run_directory), task=task)
        if not any(curve.returns.size for curve in (run.evaluation, *run.training.values())):
            _log.info("no curves.png: no game has ended yet")
            return
        plot.draw_run(run, run_directory / "curves.png")
    except Exception as error:  # also errors of matplotlib about the disk or a file
        _log.warning("no curves.png: %s", error)


class _CancelledError(Exception):
    pass


def record_game(
    config: Config, spec: SegmentSpec, dqn: Dqn, params: Params, path: str, cancelled: Callable[[], bool]
) -> float | None:
    """Plays one game as an evaluation does and writes its video to `path`, in raw colour frames at the console's speed.

    Returns the game's return; None, with nothing written, if the game has no screen or was cancelled. OSError or
    av.FFmpegError where the video cannot be written.
    """
    rng = process_rng(config.seed, ROLE_NUMBERS["evaluator"], 1)
    environment = Environment(
        config, spec, rng.integers(2**31, size=1), config.evaluator.max_episode_frames, rendered=True
    )
    tracker, key = EpisodeTracker(1), jax.random.key(int(rng.integers(2**31)))
    epsilon = np.full(1, config.evaluator.epsilon, np.float32)
    step, call = environment.receive(), 0
    tracker.add(step)
    try:
        screen = environment.screen()
        if screen is None:
            return None
        with video_writer(path, Fraction(EMULATOR_FRAMES_PER_SECOND, config.environment.frame_skip)) as add:
            while screen is not None:
                add(screen)
                if cancelled():
                    raise _CancelledError
                output = dqn.act(params, step.observation, epsilon, key, call)
                environment.send(np.asarray(output.action), step.env_id)
                step, call = environment.receive(), call + 1
                for episode in tracker.add(step):
                    return episode.episode_return
                screen = environment.screen()
        return None
    except _CancelledError:  # raised within the context, so that no fragment takes the place of a whole video
        return None
    finally:
        environment.close()
