"""The evaluation of a checkpoint by a command, without the other roles of its run."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.registry import make_algorithm, resolved
from apex_jax.config import Config
from apex_jax.config.load import CONFIG_NAME
from apex_jax.environments.environment import can_render
from apex_jax.host.disk import run_of_checkpoint
from apex_jax.links.weights_client import Weights
from apex_jax.policy import restore_params
from apex_jax.process import StopSignal
from apex_jax.types import SegmentSpec
from apex_jax.workers.evaluation import Evaluator
from apex_jax.workers.recording import Film, complete_film, frames_per_second


def evaluate_checkpoint(config: Config, spec: SegmentSpec, stop: StopSignal) -> None:
    """Evaluates `evaluator.checkpoint` and prints the result. Raises RunError without a checkpoint or film."""
    algorithm = make_algorithm(config, spec)
    run_directory, updates = run_of_checkpoint(config.evaluator.checkpoint)
    weights = saved_weights(resolved(config, spec), run_directory, algorithm, updates)
    video = config.evaluator.video
    with Film(video, frames_per_second(config)) as film:
        evaluator = Evaluator(config, spec, algorithm, filmed=video != "" and can_render(config))
        with contextlib.closing(evaluator.environment):
            returns = evaluator.evaluate(weights.params, stop.is_set, film.add if video else None)
        if returns is None:
            return
        evaluation = evaluator.evaluation(returns, weights)
        print(evaluation.describe())
        if Path(run_directory, CONFIG_NAME).is_file():  # an exported policy stays as it was published
            evaluation.store(run_directory, algorithm.evaluation_exploration)
        if video:
            complete_film(film, config, float(returns[0]))


def saved_weights(config: Config, run_directory: str, algorithm: Algorithm, updates: int | None = None) -> Weights:
    """Returns the params of the newest checkpoint, or of the one after `updates`. Raises RunError."""
    params, progress = restore_params(config, run_directory, algorithm, updates)
    return Weights(
        params=params,
        version=progress.weights_version,
        learner_peer_id=0,
        updates=progress.updates,
        environment_steps=progress.environment_steps,
        final=True,
        published_seconds=time.monotonic(),
    )
