"""The evaluator: plays full games with the newest weights, or with a checkpoint's; sends no experience."""

from __future__ import annotations

import contextlib
import json
import logging
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
from apex_jax.config.load import CONFIG_NAME
from apex_jax.environments.environment import can_render, environment_spec_of, has_reference_simulator
from apex_jax.host.disk import run_of_checkpoint
from apex_jax.host.errors import RunError, short_repr
from apex_jax.links.weights_client import Weights, WeightsClient
from apex_jax.operations.run_page import write_report
from apex_jax.plotting.video import video_of_run
from apex_jax.policy import restore_params
from apex_jax.process import SUPERVISED, StopSignal
from apex_jax.run.best import BestEvaluation, keep_if_best
from apex_jax.run.evaluations import FILE_NAME, return_text, spread
from apex_jax.run.metric_files import append_line, read_metrics
from apex_jax.run.provenance import check_resumable
from apex_jax.transport.params_codec import architecture_of, encode_weights
from apex_jax.types import SegmentSpec
from apex_jax.workers.evaluation import Evaluation, Evaluator
from apex_jax.workers.recording import (
    COMPLETING_THE_FILM,
    Film,
    check_video,
    draw_curves,
    film_in_simulator,
    frames_per_second,
)
from apex_jax.workers.role import RoleContext, checked_spec, open_role
from apex_jax.workers.saver import FIRST_CHECKPOINT_SECONDS

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
    phase = "playing"
    role.describe = lambda: {
        "weights_version": client.newest.version if client.newest is not None else None,
        "steps_per_second": evaluator.steps_per_second,
        "peers": {"learner": client.peer_state},
        "phase": phase,
    }
    hint = "" if is_supervised else "; to evaluate a finished run instead, give checkpoint=RUN_DIRECTORY"
    _log.info("waiting for weights from the learner at %s%s", config.addresses.weights, hint)
    try:
        while not stop.is_set() and not (weights is not None and weights.final):
            weights = _next_weights(client, weights, config.evaluator.interval_seconds, stop)
            if weights is None and stop.run_is_over:  # the learner stopped before this process joined
                weights = _saved_weights(resolved(config, spec), config.directory, algorithm)
            if weights is None:
                continue
            cancelled = partial(_is_cancelled, stop, client, weights)
            video = config.evaluator.video or str(Path(config.directory, "video"))
            with Film(video, frames_per_second(config)) as film:
                returns = evaluator.evaluate(weights.params, cancelled, film.add if weights.final else None)
                if returns is None:
                    continue
                evaluation = Evaluation(returns, weights.updates, weights.environment_steps, evaluator.seconds)
                client.best_return = max(client.best_return, float(returns.mean()))
                _write(role, evaluation, client.dropped)
                _keep(config, config.directory, evaluation, algorithm.evaluation_exploration)
                _keep_if_best(config, spec, evaluation, weights.params)
                if weights.final:
                    phase = COMPLETING_THE_FILM
                    film.finish()
            if weights.final:
                if has_reference_simulator(config):
                    _film_in_simulator(role, algorithm, weights, video)
                else:
                    _log_film(config, film, returns[0])
                if not is_supervised:  # a supervisor draws them after this process has ended
                    draw_curves(Path(config.directory), config.environment.task)
                    write_report(config)
    finally:
        evaluator.environment.close()
        client.close()


def evaluate_checkpoint(config: Config, spec: SegmentSpec, stop: StopSignal) -> None:
    """Evaluates `evaluator.checkpoint` and prints the result."""
    algorithm = make_algorithm(config, spec)
    run_directory, updates = run_of_checkpoint(config.evaluator.checkpoint)
    weights = _saved_weights(resolved(config, spec), run_directory, algorithm, updates)
    video = config.evaluator.video
    with Film(video, frames_per_second(config)) as film:
        evaluator = Evaluator(config, spec, algorithm, filmed=video != "" and can_render(config))
        with contextlib.closing(evaluator.environment):
            returns = evaluator.evaluate(weights.params, stop.is_set, film.add if video else None)
        if returns is None:
            return
        evaluation = Evaluation(returns, weights.updates, weights.environment_steps, evaluator.seconds)
        print(_describe(config, evaluation) + _age(run_directory, evaluation.updates))
        _keep(config, run_directory, evaluation, algorithm.evaluation_exploration)
        film.finish()
    if film.error is not None:
        raise RunError(f"evaluator.video={short_repr(video)}: {film.error}")
    if video and has_reference_simulator(config):
        _log_simulated(*film_in_simulator(config, algorithm, weights.params, video, stop))
    elif video:
        _log_film(config, film, returns[0])


def _film_in_simulator(role: RoleContext, algorithm: Algorithm, weights: Weights, video: str) -> None:
    try:
        episode_return, paths = film_in_simulator(role.config, algorithm, weights.params, video, role.stop)
    except RunError as error:  # the evaluation is valid nevertheless
        _log.info("no video: %s", error)
    else:
        role.write_metrics(weights.environment_steps, {"eval/film_return": episode_return}, Counter())
        _log_simulated(episode_return, paths)


def _log_simulated(episode_return: float, paths: list[Path]) -> None:
    files = " and ".join(map(str, paths))
    _log.info(
        "recorded an episode in the task's own simulator, with a return of %s: %s", return_text(episode_return), files
    )


def _log_film(config: Config, film: Film, game_return: float) -> None:
    if film.error is not None:  # the evaluation is valid nevertheless
        _log.warning("no video: %s", film.error)
    elif not film.paths:
        _log.info("no video: %s has no screen", config.environment.task)
    else:
        files = " and ".join(map(str, film.paths))
        _log.info("recorded the first of these games, with a return of %s: %s", return_text(game_return), files)


def _saved_weights(config: Config, run_directory: str, algorithm: Algorithm, updates: int | None = None) -> Weights:
    """Returns the params of the newest checkpoint, or of the one of `updates`, on the device.

    Raises RunError if there is no compatible one.
    """
    restored = restore_params(config, run_directory, algorithm, updates)
    if restored is None:
        if not Path(run_directory, CONFIG_NAME).is_file():
            checkpoints = Path(run_directory).absolute() / "checkpoints"
            raise RunError(f"{run_directory}: no checkpoint in {checkpoints}; give the directory of a run")
        seconds = min(FIRST_CHECKPOINT_SECONDS, config.learner.checkpoint_interval_seconds)
        when = f"the learner saves the first checkpoint {seconds:g} s after its first update; try again then"
        raise RunError(f"{run_directory}: nothing is saved yet, {when}")
    params, progress = restored
    return Weights(
        params=params,
        version=progress.weights_version,
        learner_peer_id=0,
        updates=progress.updates,
        environment_steps=progress.environment_steps,
        final=True,
        published_seconds=time.monotonic(),
    )


def _next_weights(
    client: WeightsClient, last: Weights | None, pause_seconds: float, stop: StopSignal
) -> Weights | None:
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
            seen = newest  # of a restarted learner, which publishes what it has restored
        stop.wait(0.1)
    return None


def _is_cancelled(stop: StopSignal, client: WeightsClient, weights: Weights) -> bool:
    """Returns whether to stop, or the run has ended, so that these weights are not its final ones."""
    if stop.is_set() or weights.final:  # with the final weights, it no longer matters what becomes of the link
        return stop.is_set()
    newest = client.newest
    return stop.run_is_over or (newest is not None and newest.final)


def _write(role: RoleContext, evaluation: Evaluation, dropped: Counter[str]) -> None:
    frames = evaluation.environment_steps * role.config.environment.frame_skip
    values = evaluation.values(role.config.environment.task)
    role.write_metrics(evaluation.environment_steps, {**values, "eval/frames": frames}, dropped.copy())
    _log.info("%s", _describe(role.config, evaluation))


def _keep(config: Config, run_directory: str, evaluation: Evaluation, exploration: float) -> None:
    """Appends the returns of all games to the run's evaluations."""
    line = {
        "time": time.time(),  # unix seconds
        "updates": evaluation.updates,
        "frames": evaluation.environment_steps * config.environment.frame_skip,
        "exploration": exploration,
        "seed": config.seed,
        "seconds": evaluation.seconds,
        "mean": float(evaluation.returns.mean()),
        **spread(evaluation.returns),
        "returns": evaluation.returns.tolist(),
    }
    try:
        append_line(Path(run_directory, FILE_NAME), json.dumps(line).encode() + b"\n")
    except OSError as error:  # not fatal: the run directory of another user may be read-only
        _log.warning("the games' returns are not kept: %s", error)


def _keep_if_best(config: Config, spec: SegmentSpec, evaluation: Evaluation, params: Params) -> None:
    best = BestEvaluation(
        mean_return=float(evaluation.returns.mean()),
        episodes=len(evaluation.returns),
        updates=evaluation.updates,
        environment_steps=evaluation.environment_steps,
        frames=evaluation.environment_steps * config.environment.frame_skip,
        unix_seconds=time.time(),
        architecture=architecture_of(params),
    )
    keep_if_best(config, environment_spec_of(config, spec), best, encode_weights(params))


def _describe(config: Config, evaluation: Evaluation) -> str:
    values = evaluation.values(config.environment.task)
    frames = evaluation.environment_steps * config.environment.frame_skip
    text = (
        f"{config.environment.task}: mean return {return_text(values['eval/episodic_return'])},"
        f" median {return_text(values['eval/episodic_return_median'])},"
        f" lowest {evaluation.returns.min():g}, highest {evaluation.returns.max():g},"
        f" standard deviation {return_text(values['eval/episodic_return_standard_deviation'])}"
        f" over {len(evaluation.returns)} game{'s' * (len(evaluation.returns) != 1)}"
    )
    if (score := values.get("eval/human_normalized_score")) is not None:
        text += f", human-normalised {score:.0%}"
    return f"{text}, after {evaluation.updates:,} updates and {frames:,} frames"


def _age(run_directory: str, updates: int) -> str:
    """Returns how far a run is ahead of its checkpoint at `updates`, as far as the learner's metrics tell."""
    try:
        lines = read_metrics(Path(run_directory, "metrics", "learner.jsonl"))
    except OSError:
        return ""
    newest = next((int(n) for line in reversed(lines) if (n := line.get("learner/updates")) is not None), 0)
    if newest <= updates:
        return ""
    return f"; the run has made {newest:,} updates, {newest - updates:,} more than this checkpoint"


def run(config: Config, name: str, stop: StopSignal) -> int:
    """Runs the role and returns the process's exit code."""
    spec = checked_spec(config)
    check_video(config)  # fails before the games are played
    run_directory, _ = run_of_checkpoint(config.evaluator.checkpoint)
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
