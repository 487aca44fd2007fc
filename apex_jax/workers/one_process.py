"""A run in one process: actor, replay and learner take turns, so that two runs with one seed are equal bit for bit.

These roles are as on a fleet, with the links of `apex_jax.links.in_process` in place of sockets. In each turn the
environments make one step, the learner makes the updates that `replay.samples_per_insert` allows, and the next step
acts with their parameters. Evaluations are due after a number of updates; learning depends on no clock.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax

from apex_jax.config import Config
from apex_jax.environments.environment import can_render
from apex_jax.links.in_process import InProcessExperience, InProcessReplay, InProcessWeights
from apex_jax.operations.live_view import LiveView, final_summary
from apex_jax.operations.progress import ProgressReader, RunProgress
from apex_jax.process import ROLE_NUMBERS, StopSignal, process_rng
from apex_jax.replay.replay import Replay
from apex_jax.run.evaluations import Evaluation
from apex_jax.run.identity import new_identity
from apex_jax.types import EnvironmentSpec, SegmentSpec
from apex_jax.workers.actor import Actor
from apex_jax.workers.evaluator import Evaluator, finish_film, record
from apex_jax.workers.learner import Learner, learn_and_end, open_learner
from apex_jax.workers.local import check_local, open_run
from apex_jax.workers.recording import Film, draw_curves, film_in_simulator
from apex_jax.workers.replay_server import ReplayMetrics
from apex_jax.workers.role import RoleContext, open_role

LOOK_SECONDS = 0.5  # between two updates of the live view and the page
PARTS_OF_A_RUN = 10  # one evaluation after each
UPDATES_BETWEEN_EVALUATIONS = 5_000  # of a run that total_updates does not limit


@dataclass(eq=False)
class OneProcess:
    """The parts of a run, and the loop in which they take turns; `open_parts` makes it."""

    role: RoleContext  # of the learner
    replay_role: RoleContext
    evaluator_role: RoleContext
    environment_spec: EnvironmentSpec
    replay: Replay
    experience: InProcessExperience
    actor: Actor
    learner: Learner
    weights: InProcessWeights
    evaluator: Evaluator
    look: Callable[[str], None]  # shows the progress, in the given phase
    on_evaluation: Callable[[Evaluation], bool | None]  # returns whether to end the run
    is_ended: bool = False  # by `on_evaluation`
    next_look: float = 0.0
    next_metrics: float = 0.0

    def learn(self) -> str | None:
        """Acts and learns; returns the limit that was reached, or None if the process was stopped first."""
        stop, learner, interval = self.role.stop, self.learner, _updates_between_evaluations(self.role.config)
        next_evaluation = (learner.counters.updates // interval + 1) * interval
        metrics = ReplayMetrics(self.replay, self.role.config.environment.frame_skip)
        learner.next_publish = math.inf  # published here, at a point that depends on no clock
        learner.publish()
        with contextlib.closing(self.actor.act(self.experience.join())) as steps:
            while not stop.is_set() and (reason := self._limit_reached()) is None:
                next(steps, None)
                self._learn(next_evaluation)
                if learner.counters.updates != self.weights.updates:
                    learner.publish()
                if learner.counters.updates >= next_evaluation and self._limit_reached() is None:
                    next_evaluation = (learner.counters.updates // interval + 1) * interval
                    self.evaluate()
                self.beat()
                self._write_when_due(metrics)
        self._write_metrics(metrics)
        self.actor.write_metrics()
        return None if stop.is_set() else reason

    def _limit_reached(self) -> str | None:
        return "the callback ended it" if self.is_ended else self.learner.limit_reached()

    def _learn(self, most_updates: int) -> None:
        """Makes the updates that are allowed now, up to `most_updates` of the run.

        If replay.samples_per_insert=0 allows any number, makes those of one call.
        """
        learner, replay = self.learner, cast(InProcessReplay, self.learner.replay)
        before, is_unlimited = learner.counters.updates, not self.role.config.replay.samples_per_insert
        while replay.has_next and learner.counters.updates < most_updates and learner.limit_reached() is None:
            learner.step()
            learner.finish_calls()  # before the next draw, whose probabilities depend on their priorities
            if is_unlimited and learner.counters.updates > before:
                return
        if learner.counters.updates == before:
            learner.step()  # writes metrics and saves when due, also while the replay fills

    def evaluate(self, film: Film | None = None) -> None:
        """Evaluates the newest parameters, unless the process is stopped. `film`: receives the first game."""
        weights, stop = self.weights.newest, self.role.stop
        assert weights is not None
        returns = self.evaluator.evaluate(weights.params, stop.is_set, film.add if film else None)
        if returns is None:
            return
        evaluation = self.evaluator.evaluation(returns, weights)
        self.weights.best_return = max(self.weights.best_return, evaluation.mean)
        record(self.evaluator_role, self.environment_spec, evaluation, weights.params)
        self.look(self._phase())  # the score first: film, curves and report come after it
        self.is_ended |= bool(self.on_evaluation(evaluation))
        if film is not None:
            finish_film(film, evaluation)

    def beat(self) -> None:
        """Shows the progress at times. Called at each step of the environments."""
        self.role.stop.beat()
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_SECONDS
            self.look(self._phase())

    def _phase(self) -> str:
        """Returns the phase if it is an evaluation, otherwise an empty string."""
        if not (playing := self.evaluator.unfinished_games):
            return ""
        games, steps = self.role.config.evaluator.episodes, self.evaluator.steps_per_second
        return f"evaluating ({playing} of {games} games not ended, {steps:,.0f} steps per second)"

    def _write_when_due(self, metrics: ReplayMetrics) -> None:
        now = time.monotonic()
        self.replay.journal.flush(now)
        if now >= self.next_metrics:
            self.next_metrics = now + self.role.config.metrics_interval_seconds
            self.replay.snapshot_if_due(now)
            self._write_metrics(metrics)

    def _write_metrics(self, metrics: ReplayMetrics) -> None:
        values = metrics.take(self.experience.episodes, actors=1)
        self.replay_role.write_metrics(self.replay.ledger.steps, values)


def _updates_between_evaluations(config: Config) -> int:
    tenth = config.total_updates // PARTS_OF_A_RUN or UPDATES_BETWEEN_EVALUATIONS
    return config.evaluator.interval_updates or tenth


@contextlib.contextmanager
def open_parts(
    role: RoleContext,
    environment_spec: EnvironmentSpec,
    look: Callable[[str], None],
    on_evaluation: Callable[[Evaluation], bool | None],
) -> Iterator[OneProcess]:
    """Restores replay and learner, if the run was started before, and closes them on leaving."""
    config, spec, stop = role.config, environment_spec.spec, role.stop
    with contextlib.ExitStack() as opened:
        replay = Replay(config, spec, process_rng(config.seed, ROLE_NUMBERS["replay"]), role.run_identity.name)
        opened.callback(replay.journal.close)
        role.run_identity.adopt(replay.restore(time.monotonic()), f"the replay in {config.directory}/replay")

        def serve_weights(role: RoleContext, peer_id: int, first_version: int, architecture: str) -> Any:
            return InProcessWeights(first_version)

        def join_replay(role: RoleContext, spec: SegmentSpec, *_: int) -> Any:
            batches = config.learner.updates_of_a_call(jax.default_backend() == "cpu")
            return InProcessReplay(replay, config, spec, batches)

        learner = opened.enter_context(open_learner(role, environment_spec, serve_weights, join_replay))
        if not role.run_identity.name:
            role.run_identity.adopt(new_identity(), "this run")
        opened.callback(lambda: replay.finish(time.monotonic()))  # not before: a refused start leaves the run as it was
        replay.journal.on_run(role.run_identity.name)
        weights, experience = cast(Any, learner.weights), InProcessExperience(replay, config, spec)
        others = {name: RoleContext(config, role.sockets, name, stop) for name in ("replay", "actor-0", "evaluator")}
        for other in others.values():
            other.loggers = role.loggers
        links = weights, cast(Any, experience), experience.peer_id
        actor = Actor(others["actor-0"], environment_spec, learner.algorithm, *links)
        evaluator = Evaluator(config, environment_spec, learner.algorithm, can_render(config, environment_spec))
        opened.callback(evaluator.environment.close)
        parts = replay, experience, actor, learner, weights, evaluator, look, on_evaluation
        one = OneProcess(role, others["replay"], others["evaluator"], environment_spec, *parts)
        evaluator.beat = one.beat
        yield one


def train(
    config: Config,
    environment_spec: EnvironmentSpec,
    stop: StopSignal,
    view: Callable[[RunProgress], None],
    on_evaluation: Callable[[Evaluation], bool | None] = lambda evaluation: None,
    on_page: Callable[[str], None] = lambda address: None,
) -> RunProgress | None:
    """Trains until a limit is reached or `stop` is set; returns the progress, or None if a limit had been reached.

    `environment_spec`: as `check_local` returns it; `view`: is called with the progress about twice a second;
    `on_evaluation`: with each evaluation, returns whether to end the run; `on_page`: with the address of the page.
    """
    environments = config.actor.environments
    actor = replace(config.actor, processes=1, environments_per_step=environments)  # in a fixed order
    config = config.replace(run_directory=config.directory, actor=actor)
    with open_run(config, stop) as page:
        if page is None or stop.is_set():
            return None
        on_page(page.address)
        reader = ProgressReader(config.directory, config)

        def look(phase: str = "") -> None:
            progress = reader.read()
            progress = replace(progress, phase=phase or progress.phase)
            view(progress)
            page.update(progress)

        with (
            open_role(config, "learner", "learner", stop) as role,
            open_parts(role, environment_spec, look, on_evaluation) as one,
        ):
            role.describe = one.learner.describe
            learn_and_end(one.learner, one.learn)
            if not stop.is_set() and not one.is_ended:  # else the callback has just received their evaluation
                with Film(config, environment_spec) as last_game:
                    one.evaluate(last_game)
            look()
        draw_curves(Path(config.directory), config.environment.task)
        film = None if one.is_ended else film_in_simulator(config, stop)
        progress = replace(reader.read(), film=film)
        page.finish(progress)
        return progress


def run(config: Config, name: str, stop: StopSignal) -> int:
    """Runs all roles in this process and returns its exit code."""
    environment_spec = check_local(config)
    with contextlib.ExitStack() as opened:
        views = list[LiveView]()

        def begin(address: str) -> None:
            views.append(LiveView(config, sys.stdout, page_address=address))
            opened.callback(views[0].close)

        progress = train(config, environment_spec, stop, lambda progress: views[0].update(progress), on_page=begin)
    if progress is not None:
        print(final_summary(progress, config, can_render(config, environment_spec)), flush=True)
    return stop.exit_code
