"""The evaluator: plays full games with the newest weights, or with a checkpoint's; sends no experience."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from apex_jax.agent.algorithm import Algorithm, Params
from apex_jax.agent.registry import make_algorithm, resolved
from apex_jax.config import Config
from apex_jax.config.trust import code_settings
from apex_jax.environments.environment import can_render, environment_spec_of
from apex_jax.host.disk import run_of_checkpoint
from apex_jax.host.errors import RunError
from apex_jax.links.weights_client import Weights, WeightsClient
from apex_jax.operations.run_page import write_report
from apex_jax.plotting.video import video_of_run
from apex_jax.process import SUPERVISED, StopSignal
from apex_jax.run.best import BestEvaluation, keep_if_best, run_directory_of
from apex_jax.run.provenance import check_resumable, find_code
from apex_jax.transport.params_codec import architecture_of, encode_weights
from apex_jax.types import SegmentSpec
from apex_jax.workers.checkpoint_evaluation import evaluate_checkpoint, saved_weights
from apex_jax.workers.evaluation import Evaluation, Evaluator
from apex_jax.workers.recording import Film, check_video, complete_film, draw_curves, frames_per_second
from apex_jax.workers.role import RoleContext, checked_spec, open_role

_log = logging.getLogger(__name__)


def follow(role: RoleContext, spec: SegmentSpec) -> None:
    """Evaluates the newest weights repeatedly; at the end, evaluates the final weights and records a game."""
    config, stop = role.config, role.stop
    algorithm = make_algorithm(config, spec)
    evaluator = Evaluator(config, spec, algorithm, filmed=can_render(config), beat=stop.beat)
    is_supervised = bool(os.environ.get(SUPERVISED))
    like_params = algorithm.acting_params(jax.eval_shape(algorithm.init, jax.random.key(0)))
    client = WeightsClient(
        role.sockets,
        config.addresses.weights,
        like_params,
        config.weights_compatibility_key,
        config.away_limit_seconds,
        role.run_identity,
    )
    weights: Weights | None = None
    phase, evaluations, published_seconds = "playing", 0, math.nan  # when the weights in play were published
    role.describe = lambda: {
        "weights_version": client.newest.version if client.newest is not None else None,
        "weights_age_seconds": time.monotonic() - published_seconds,
        "steps_per_second": evaluator.steps_per_second,
        "peers": {"learner": client.peer_state},
        "phase": phase,
    }
    role.counts = lambda: {"evaluations": evaluations}
    hint = "" if is_supervised else "; to evaluate a finished run instead, give checkpoint=RUN_DIRECTORY"
    _log.info("waiting for weights from the learner at %s%s", config.addresses.weights, hint)
    try:
        while not stop.is_set() and not (weights is not None and weights.final):
            weights = next_weights(client, weights, config.evaluator.interval_seconds, stop)
            if weights is None and stop.run_is_over:  # the learner stopped before this process joined
                weights = saved_weights(resolved(config, spec), config.directory, algorithm)
            if weights is None:
                continue
            published_seconds = weights.published_seconds
            cancelled = partial(is_cancelled, stop, client, weights)
            video = config.evaluator.video or str(Path(config.directory, "video"))
            with Film(video, frames_per_second(config)) as film:
                returns = evaluator.evaluate(weights.params, cancelled, film.add if weights.final else None)
                if returns is None:
                    continue
                evaluation = evaluator.evaluation(returns, weights)
                client.best_return = max(client.best_return, float(returns.mean()))
                record(role, spec, algorithm, evaluation, weights.params, client.dropped.copy())
                evaluations += 1
                if weights.final:
                    phase = "completing the film"
                    finish_film(film, config, evaluation)
        if not stop.is_set() and not is_supervised:  # a supervisor does this after its evaluator has ended
            draw_curves(Path(config.directory), config.environment.task)
            write_report(config)
    finally:
        evaluator.environment.close()
        client.close()


def record(
    role: RoleContext,
    spec: SegmentSpec,
    algorithm: Algorithm,
    evaluation: Evaluation,
    params: Params,
    dropped: Counter[str] | None = None,
) -> None:
    """Writes an evaluation to metrics, log and `evaluations.jsonl`, and the parameters to `best` if it is the best."""
    config = role.config
    role.write_metrics(evaluation.environment_steps, evaluation.values(), dropped)
    _log.info("%s", evaluation.describe())
    evaluation.store(config.directory, algorithm.evaluation_exploration)
    best = BestEvaluation(
        mean_return=float(evaluation.returns.mean()),
        episodes=len(evaluation.returns),
        updates=evaluation.updates,
        environment_steps=evaluation.environment_steps,
        frames=evaluation.frames,
        unix_seconds=time.time(),
        architecture=architecture_of(params),
    )
    keep_if_best(config, environment_spec_of(config, spec), best, encode_weights(params))


def finish_film(film: Film, config: Config, evaluation: Evaluation) -> None:
    """Completes the film of a run's last evaluation; logs the reason if there is no film."""
    try:
        complete_film(film, config, float(evaluation.returns[0]))
    except RunError as error:  # the evaluation is valid nevertheless
        _log.info("no video: %s", error)


def next_weights(client: WeightsClient, last: Weights | None, pause_seconds: float, stop: StopSignal) -> Weights | None:
    """Returns new weights after a pause, or the final ones; None if the process stops or none will arrive."""
    until = time.monotonic() + (pause_seconds if last is not None else 0)
    seen = last
    while not stop.is_set():
        stop.beat()
        is_due = time.monotonic() >= until
        newest = client.fetch_after(seen, timeout_seconds=0.1) if is_due else client.newest
        if newest is not None and newest.final:
            return newest
        if stop.run_is_over:
            return None
        if newest is not None and is_due:
            if last is None or newest.updates != last.updates:
                return newest
            seen = newest  # a restarted learner publishes the weights of its checkpoint, which may be evaluated already
        stop.wait(0.1)
    return None


def is_cancelled(stop: StopSignal, client: WeightsClient, weights: Weights) -> bool:
    """Returns whether to stop, or the run has ended, so that these weights are not its final ones."""
    if stop.is_set() or weights.final:  # the final weights are evaluated even if the link is lost
        return stop.is_set()
    newest = client.newest
    return stop.run_is_over or (newest is not None and newest.final)


def run(config: Config, name: str, stop: StopSignal) -> int:
    """Runs the role and returns the process's exit code."""
    run_directory, _ = run_of_checkpoint(config.evaluator.checkpoint)
    if config.evaluator.checkpoint:
        find_code(run_directory_of(run_directory), is_named=bool(code_settings(config)))
    spec = checked_spec(config)
    check_video(config)  # fails before the games are played
    if config.evaluator.video:
        video = video_of_run(config.evaluator.video, run_directory or config.directory)
        config = config.replace(evaluator=replace(config.evaluator, video=video))
    if config.evaluator.checkpoint:
        fix = "leave those settings out, or give another checkpoint"
        check_resumable(config, run_directory, fix)
        evaluate_checkpoint(config, spec, stop)
        return stop.exit_code
    with open_role(config, "evaluator", name, stop) as role:
        follow(role, spec)
    return stop.exit_code
