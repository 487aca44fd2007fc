"""The evaluator: plays full games with the newest weights, or with a checkpoint's; sends no experience."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from apex_jax.agent.algorithm import Algorithm, Params
from apex_jax.agent.registry import make_algorithm, resolved
from apex_jax.config import Config
from apex_jax.config.load import CONFIG_NAME, code_settings
from apex_jax.environments.atari_scores import human_normalized_score
from apex_jax.environments.environment import EpisodeTracker, VectorEnvironment, can_render
from apex_jax.host.disk import run_of_checkpoint
from apex_jax.host.errors import RunError
from apex_jax.links.weights_client import Weights, WeightsClient
from apex_jax.operations.pages import write_report
from apex_jax.plotting.video import video_of_run
from apex_jax.process import ROLE_NUMBERS, SUPERVISED, StopSignal, process_rng
from apex_jax.run.evaluations import Evaluation, run_directory_of
from apex_jax.run.params_file import keep_if_best
from apex_jax.run.provenance import check_resumable, find_code
from apex_jax.types import EnvironmentSpec, joined, named_parts
from apex_jax.workers.recording import Film, check_video, draw_curves
from apex_jax.workers.role import RoleContext, checked_description, open_role

_log = logging.getLogger(__name__)


def follow(role: RoleContext, environment_spec: EnvironmentSpec) -> None:
    """Evaluates the newest weights repeatedly; at the end, evaluates the final weights and records a game."""
    config, stop = role.config, role.stop
    algorithm, is_filmed = make_algorithm(config, environment_spec.spec), can_render(config, environment_spec)
    evaluator = Evaluator(config, environment_spec, algorithm, is_filmed, stop.beat)
    is_supervised = bool(os.environ.get(SUPERVISED))
    like_params = algorithm.acting_params(jax.eval_shape(algorithm.init, jax.random.key(0)))
    client = WeightsClient(role.link_end("weights"), like_params, config.weights_compatibility_key)
    weights: Weights | None = None
    phase, evaluations, published_seconds = "playing", 0, math.nan  # when the weights in play were published
    role.describe = lambda: {
        "weights_version": client.newest.version if client.newest is not None else None,
        "weights_age_seconds": time.monotonic() - published_seconds,
        "steps_per_second": evaluator.steps_per_second,
        "peers": {"learner": client.peer_state},
        "counts": {"evaluations": evaluations},
        "does": phase if client.newest is not None else "waits for weights",
    }
    hint = "" if is_supervised else "; to evaluate a finished run instead, give checkpoint=RUN_DIRECTORY"
    _log.info("waiting for weights from the learner at %s%s", config.addresses.weights, hint)
    with contextlib.closing(client), contextlib.closing(evaluator.environment):
        while not stop.is_set() and not (weights is not None and weights.final):
            weights = next_weights(client, weights, config.evaluator.interval_seconds, stop)
            if weights is None and stop.run_is_over:  # the learner stopped before this process joined
                weights = saved_weights(resolved(config, environment_spec.spec), config.directory, algorithm)
            if weights is None:
                continue
            published_seconds = weights.published_seconds
            cancelled = partial(is_cancelled, stop, client, weights)
            with Film(config, environment_spec) as film:
                returns = evaluator.evaluate(weights.params, cancelled, film.add if weights.final else None)
                if returns is None:
                    continue
                evaluation = evaluator.evaluation(returns, weights)
                client.best_return = max(client.best_return, evaluation.mean)
                record(role, environment_spec, evaluation, weights.params, client.dropped.copy())
                evaluations += 1
                if weights.final:
                    phase = "completing the film"
                    finish_film(film, evaluation)
        if not stop.is_set() and not is_supervised:  # a supervisor does this after its evaluator has ended
            draw_curves(Path(config.directory), config.environment.task)
            write_report(config)


def record(
    role: RoleContext,
    environment_spec: EnvironmentSpec,
    evaluation: Evaluation,
    params: Params,
    dropped: Counter[str] | None = None,
) -> None:
    """Writes an evaluation to metrics, log and `evaluations.jsonl`, and the parameters to `best` if it is the best."""
    config = role.config
    role.write_metrics(evaluation.environment_steps, evaluation.values(), dropped)
    _log.info("%s: %s", config.environment.task, evaluation.describe())
    evaluation.store(config.directory, config.seed)
    agent = resolved(config, environment_spec.spec).algorithm.name
    keep_if_best(config, environment_spec, evaluation, params, agent)


def finish_film(film: Film, evaluation: Evaluation) -> None:
    """Completes the film of a run's last evaluation; logs the reason if there is no film."""
    try:
        film.complete(float(evaluation.returns[0]))
    except RunError as error:  # the evaluation is valid nevertheless
        _log.info("no video: %s", error)


def next_weights(client: WeightsClient, last: Weights | None, pause_seconds: float, stop: StopSignal) -> Weights | None:
    """Returns new weights after a pause, or the final ones; None if the process stops or none will arrive.

    Weights without an update are not played, and the pause follows them, too: games would take the cores from the start
    of the run.
    """
    until, seen = time.monotonic() + (pause_seconds if last is not None else 0), last
    while not stop.is_set():
        stop.beat()
        is_due = time.monotonic() >= until
        newest = client.fetch_after(seen, timeout_seconds=0.1) if is_due else client.newest
        if newest is not None and newest.final:
            return newest
        if stop.run_is_over:
            return None
        if newest is not None and is_due:
            if newest.updates != (0 if last is None else last.updates):
                return newest
            # A restarted learner publishes the weights of its checkpoint, which may be evaluated already.
            seen, until = newest, time.monotonic() + (pause_seconds if last is None else 0)
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
    environment_spec = checked_description(config)
    check_video(config, environment_spec)  # fails before the games are played
    if config.evaluator.video:
        video = video_of_run(config.evaluator.video, run_directory or config.directory)
        config = config.replace(evaluator=replace(config.evaluator, video=video))
    if config.evaluator.checkpoint:
        fix = "leave those settings out, or give another checkpoint"
        check_resumable(config, run_directory, fix)
        evaluate_checkpoint(config, environment_spec, stop)
        return stop.exit_code
    with open_role(config, "evaluator", name, stop) as role:
        follow(role, environment_spec)
    return stop.exit_code


# An evaluation: full games of one policy, all in parallel -------------------------------------------------------------


class Evaluator:
    """Plays `evaluator.episodes` games in parallel, exactly one per environment; the caller closes the environments.

    Counting the first games to end instead would bias the result towards short, lost games.
    """

    def __init__(
        self,
        config: Config,
        environment_spec: EnvironmentSpec,
        algorithm: Algorithm,
        filmed: bool = False,
        beat: Callable[[], None] = lambda: None,
    ):
        """`filmed`: whether evaluations can be filmed; `beat`: called at each step."""
        self.beat = beat
        self.steps_per_second = 0.0  # over all games of the current or last evaluation
        self.seconds = 0.0  # of that evaluation
        self.unfinished_games = 0  # of the current evaluation
        self._info = np.zeros((config.evaluator.episodes, len(config.metrics.info)))  # of its games
        self._config, self._settings = config, config.evaluator
        self._algorithm = algorithm
        self._rng = process_rng(config.seed, ROLE_NUMBERS["evaluator"])
        seeds = self._rng.integers(2**31, size=self._settings.episodes)
        # One pool for all evaluations, since EnvPool leaks about 2 MB per closed pool.
        limit = self._settings.max_episode_frames
        self.environment = VectorEnvironment(config, environment_spec, seeds, limit, per_step=1, rendered=filmed)
        self._observation = named_parts(environment_spec.spec.zeros(len(seeds)))

    def evaluate(
        self, params: Params, cancelled: Callable[[], bool], film: Callable[[np.ndarray | None], None] | None = None
    ) -> np.ndarray | None:
        """Returns the games' returns, float64[episodes]; None if `cancelled` before they all ended.

        All games advance in lockstep, so that equal seeds give equal games. Games that have ended are excluded from
        stepping and from the policy's batch, so that one game stuck for 27,000 steps does not cost ten times as many.
        `film`: receives each screen of the first game, see `VectorEnvironment.render`.
        """
        key = jax.random.key(int(self._rng.integers(2**31)))
        tracker = EpisodeTracker(self._settings.episodes)
        returns = np.full(self._settings.episodes, np.nan)
        playing = np.arange(self._settings.episodes)
        steps, started = 0, time.monotonic()
        for call in itertools.count():
            self.beat()
            for _ in playing:
                step = self.environment.receive()  # of one game
                for name, part in named_parts(step.observation).items():
                    self._observation[name][step.env_id] = part
                for episode in tracker.add(step):
                    returns[episode.env_id] = episode.episode_return
                    self._info[episode.env_id] = episode.info
            steps += playing.size
            self.seconds = time.monotonic() - started
            self.steps_per_second = steps / max(1e-9, self.seconds)
            has_ended = ~np.isnan(returns[playing])
            self.environment.leave_out(playing[has_ended])
            playing = playing[~has_ended]
            self.unfinished_games = playing.size
            if not playing.size or cancelled():
                break
            if film is not None and playing[0] == 0:
                film(self.environment.render())
            self.environment.send(self._actions(params, playing, key, call), playing)
        self.unfinished_games = 0
        self.environment.reset()  # for the next evaluation
        return None if playing.size else returns

    def evaluation(self, returns: np.ndarray, weights: Weights) -> Evaluation:
        """Returns the evaluation of the last games; `returns`: what `evaluate` returned for these weights."""
        environment, names = self._config.environment, self._config.metrics.info
        return Evaluation(
            time.time(),
            weights.updates,
            self._algorithm.evaluation_exploration,
            returns,
            dict(zip(names, self._info.T.copy(), strict=True)),
            weights.environment_steps,
            weights.environment_steps * environment.frame_skip,
            self.seconds,
            human_normalized_score(environment.task, float(returns.mean())),
        )

    def _actions(self, params: Params, playing: np.ndarray, key: jax.Array, call: int) -> np.ndarray:
        """Returns the actions [P, ...] of the games `playing`."""
        rows = np.resize(playing, batch_size(playing.size, self._settings.episodes))  # padded with repeated games
        exploration = np.full(rows.size, self._algorithm.evaluation_exploration, np.float32)
        seen = joined({name: part[rows] for name, part in self._observation.items()})
        output = self._algorithm.act(params, seen, exploration, key, call)
        return np.asarray(output.action)[: playing.size]


def batch_size(playing: int, episodes: int) -> int:
    """Returns the policy's batch size while `playing` of `episodes` games are running.

    It is `episodes`, or a half, a quarter, ... of it, rounded up, so that few sizes are compiled.
    """
    size = episodes
    while (half := -(-size // 2)) >= playing and half < size:
        size = half
    return size


# The evaluation of a checkpoint by a command, without the other roles of its run -------------------------------------


def evaluate_checkpoint(config: Config, environment_spec: EnvironmentSpec, stop: StopSignal) -> None:
    """Evaluates `evaluator.checkpoint` and prints the result. Raises RunError without a checkpoint or film."""
    algorithm = make_algorithm(config, environment_spec.spec)
    run_directory, updates = run_of_checkpoint(config.evaluator.checkpoint)
    weights = saved_weights(resolved(config, environment_spec.spec), run_directory, algorithm, updates)
    video = config.evaluator.video
    with Film(config, environment_spec) as film:
        is_filmed = video != "" and can_render(config, environment_spec)
        evaluator = Evaluator(config, environment_spec, algorithm, is_filmed)
        with contextlib.closing(evaluator.environment):
            returns = evaluator.evaluate(weights.params, stop.is_set, film.add if video else None)
        if returns is None:
            return
        evaluation = evaluator.evaluation(returns, weights)
        print(f"{config.environment.task}: {evaluation.describe()}")
        if Path(run_directory, CONFIG_NAME).is_file():  # an exported policy stays as it was published
            evaluation.store(run_directory, config.seed)
        if video:
            film.complete(float(returns[0]))


def saved_weights(config: Config, run_directory: str, algorithm: Algorithm, updates: int | None = None) -> Weights:
    """Returns the params of the newest checkpoint, or of the one after `updates`. Raises RunError."""
    from apex_jax.policy import restore_params  # not at the top: few evaluators need orbax, which takes 0.3 s

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
