"""The actor: steps a batch of environments with the newest weights and records the transitions as segments."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeAlias

import jax
import numpy as np

from apex_jax.agent.algorithm import Action, Algorithm, Params
from apex_jax.agent.frame_store import Array
from apex_jax.agent.registry import make_algorithm
from apex_jax.agent.rollout import make_rollout
from apex_jax.agent.segments import SegmentBuilder, spread_first_slots
from apex_jax.config import Config
from apex_jax.environments.environment import Episode, EpisodeTracker, VectorEnvironment, log_reading
from apex_jax.environments.jax_tasks import JaxEnvironment, environment_keys
from apex_jax.environments.task import BrokenEnvironment
from apex_jax.links.experience_client import ExperienceClient
from apex_jax.links.weights_client import Weights, WeightsClient
from apex_jax.process import ROLE_NUMBERS, StopSignal, digest_of_peer_id, new_peer_id, process_rng
from apex_jax.run.metrics import RateMeter
from apex_jax.segment_codec import value_limits
from apex_jax.transport.messages import ActorHello, ActorStatus, ActorWelcome, EpisodeStatistics
from apex_jax.types import EnvironmentSpec, Segment, Step, map_parts, named_parts
from apex_jax.workers.role import RoleContext, checked_description, open_role

_log = logging.getLogger(__name__)

Plays: TypeAlias = Generator[tuple[Step, Action], None, None]
PATIENCE_SECONDS = 10.0  # between two log lines while the actor waits for its servers


@dataclass(eq=False)
class Actor:
    """The loop that acts, and its state; `open_actor` makes it. Sending and receiving run on other threads."""

    role: RoleContext
    environment_spec: EnvironmentSpec
    algorithm: Algorithm
    weights: WeightsClient
    replay: ExperienceClient
    peer_id: int  # of this process
    in_use: Weights | None = None
    steps: int = 0  # environment steps made, without resets
    left_out: int = 0  # of these, in games that are not stored
    waited_seconds: float = 0.0  # total time blocked on the replay server
    step_rate: RateMeter = field(default_factory=RateMeter)
    wait_rate: RateMeter = field(default_factory=RateMeter)
    next_metrics: float = 0.0

    def run(self) -> None:
        """Acts until the process is stopped or the run is over. Raises RunError if the replay server refuses it."""
        if (welcome := self._join()) is not None:
            for _ in self.act(welcome):
                pass
        if self.replay.error is not None:
            raise self.replay.error

    def _join(self) -> ActorWelcome | None:
        """Waits for the welcome of the replay server and the first weights; returns None once the run is over.

        Logs every PATIENCE_SECONDS which one is missing.
        """
        welcome, next_word, addresses = None, time.monotonic() + PATIENCE_SECONDS, self.role.config.addresses
        while not self._is_over and (welcome is None or self.in_use is None):
            self.role.stop.beat()
            welcome = self.replay.wait_for_welcome(0.1)
            self.in_use = self.weights.fetch_after(self.in_use, timeout_seconds=0.1) or self.in_use
            if time.monotonic() >= next_word:
                missing = ("learner", addresses.weights) if welcome else ("replay server", addresses.experience)
                _log.info("still waiting for the %s at %s", *missing)
                next_word += PATIENCE_SECONDS
        return welcome if self.in_use is not None else None

    @property
    def _is_over(self) -> bool:
        return self.role.stop.is_set() or self.replay.finished.is_set()

    def act(self, welcome: ActorWelcome) -> Generator[None, None, None]:
        """Acts with the ladder indices of the welcome until the run is over.

        Each item of the iterator is a step of the environments acted on at once.
        """
        seeds, builder, exploration, key = _begin(self, welcome)
        play = self._play_compiled if self.role.config.environment.is_jax else self._play
        with contextlib.closing(play(seeds, exploration, key)) as steps:
            tracker = EpisodeTracker(len(exploration))
            self.next_metrics = time.monotonic() + self.role.config.metrics_interval_seconds
            for step, output in steps:
                segments = builder.add(step, *map(np.asarray, output))
                self._count_left_out(builder.left_out)
                self._hand_over(step, segments, tracker.add(step), exploration)
                self._write_metrics_when_due()
                yield
                if self._is_over:
                    return

    def _play(self, seeds: np.ndarray, exploration: np.ndarray, key: jax.Array) -> Plays:
        """Yields the steps of environments that run on the CPU, and the actions for them."""
        config, call = self.role.config, 0
        limit, threads = config.environment.max_episode_frames, config.actor.environment_threads
        environment = VectorEnvironment(config, self.environment_spec, seeds, limit, threads, config.actor.batch_size)
        with contextlib.closing(environment):
            while True:
                self.role.stop.beat()
                step = environment.receive()
                weights = self._newest_weights()
                output = self.algorithm.act(weights.params, step.observation, exploration[step.env_id], key, call)
                environment.send(np.asarray(output.action), step.env_id)  # they step while this one is recorded
                call = (call + 1) % 2**31  # wraps around: an int32 in the jitted policy
                yield step, output

    def _play_compiled(self, seeds: np.ndarray, exploration: np.ndarray, key: jax.Array) -> Plays:
        """Yields the steps of environments written in JAX, which are played many at once, and the actions for them."""
        rollouts = Rollouts(self.role.config, self.algorithm, seeds, exploration, key)
        started = rollouts.start(self._newest_weights().params)
        while True:
            self.role.stop.beat()
            following = rollouts.start(self._newest_weights().params)  # it runs while these steps are recorded
            yield from rollouts.steps(started)
            started = following

    def _newest_weights(self) -> Weights:
        self.in_use = self.weights.fetch_after(self.in_use) or self.in_use
        assert self.in_use is not None  # `join` has waited for the first
        return self.in_use

    def _hand_over(self, step: Step, segments: list[Segment], episodes: list[Episode], exploration: np.ndarray) -> None:
        """Gives the replay client the segments and episodes that a step has completed.

        Waits until the client has room for them, or until the run is over.
        """
        client, transitions = self.replay, int(np.count_nonzero(~step.first))
        self.steps += transitions
        client.produced += transitions
        if episodes:
            statistics = EpisodeStatistics(
                exploration[[episode.env_id for episode in episodes]],
                np.array([episode.episode_return for episode in episodes], np.float32),
                np.array([episode.steps for episode in episodes], np.int32),
                " ".join(self.role.config.metrics.info),
                np.array([episode.info for episode in episodes], np.float32),
            )
            client.put_episodes(statistics)
        for segment in segments:
            while not self._put(segment):
                if self._is_over:
                    return
                self.role.stop.beat()
                self._newest_weights()  # otherwise the actor would continue with the weights from before it was blocked
                self._write_metrics_when_due()

    def _count_left_out(self, transitions: int) -> None:
        """Counts transitions of games that were left out for a number that is too large; warns of the first."""
        if transitions and not self.left_out:
            what = f"an observation has a number beyond {value_limits(self.role.config).observation:g}"
            fix = "scale observations, or set network.normalize_observations=true"
            _log.warning("%s: its game is left out, and what follows of this kind is only counted; %s", what, fix)
        self.left_out = transitions

    def _put(self, segment: Segment) -> bool:
        started = time.monotonic()
        is_taken = self.replay.put(segment, timeout_seconds=0.2)
        self.waited_seconds += time.monotonic() - started
        return is_taken

    def _write_metrics_when_due(self) -> None:
        if time.monotonic() >= self.next_metrics:
            self.next_metrics = time.monotonic() + self.role.config.metrics_interval_seconds
            self.write_metrics()

    def write_metrics(self) -> None:
        """Writes the metrics, and reports them to the replay server; nothing before the first step."""
        now, weights = time.monotonic(), self.in_use
        if weights is None:
            return
        steps_per_second = self.step_rate.update(self.steps)
        self.replay.status = ActorStatus(steps_per_second, weights.version)
        values = {
            "actor/environment_steps": self.steps,
            "actor/steps_per_second": steps_per_second,
            "actor/wait_seconds_share": min(1.0, self.wait_rate.update(self.waited_seconds)),
            "actor/replay_disconnects": self.replay.disconnects,
            "actor/weights_age_seconds": now - weights.published_seconds,
        }
        dropped = self.replay.dropped.copy() + self.weights.dropped.copy()
        dropped["large_observation"] = self.left_out
        self.role.write_metrics(weights.environment_steps, values, dropped)

    def describe(self) -> dict[str, Any]:
        """Returns the actor's part of its report. Callable from any thread."""
        weights, frames = self.in_use, self.steps * self.role.config.environment.frame_skip
        return {
            "counts": {"frames": frames, "segments": self.replay.acknowledged_segments},
            "peer_id": digest_of_peer_id(self.peer_id),
            "weights_version": weights.version if weights is not None else None,
            "weights_age_seconds": time.monotonic() - weights.published_seconds if weights is not None else None,
            "peers": {"replay": self.replay.peer_state, "learner": self.weights.peer_state},
        }


# The opening


@contextlib.contextmanager
def open_actor(role: RoleContext, environment_spec: EnvironmentSpec) -> Iterator[Actor]:
    """Starts connecting to the replay server and the learner, without waiting for them.

    On leaving, disconnects, ends the threads and writes the last metrics.
    """
    config, spec = role.config, environment_spec.spec
    algorithm = make_algorithm(config, spec)
    like_params = algorithm.acting_params(jax.eval_shape(algorithm.init, jax.random.key(0)))
    weights = WeightsClient(role.link_end("weights"), like_params, config.weights_compatibility_key)
    peer_id, size = new_peer_id(), config.actor.environments
    hello, queue_size = ActorHello(peer_id, config.compatibility_key, size), config.actor.max_outstanding_segments
    replay = ExperienceClient(role.link_end("experience"), spec, hello, max(size, queue_size), config.actor.overflow)
    actor = Actor(role, environment_spec, algorithm, weights, replay, peer_id)
    try:
        yield actor
    finally:
        replay.close()
        weights.close()
        actor.write_metrics()


def _begin(actor: Actor, welcome: ActorWelcome) -> tuple[np.ndarray, SegmentBuilder, np.ndarray, jax.Array]:
    """Returns the environments' seeds int[N], segment builder and exploration float32[N], and a key for actions."""
    config, spec, size = actor.role.config, actor.environment_spec.spec, len(welcome.ladder_indices)
    game = config.environment
    rng = process_rng(config.seed, ROLE_NUMBERS["actor"], welcome.actor_number)
    key, seeds = jax.random.key(int(rng.integers(2**31))), rng.integers(2**31, size=size)
    exploration = actor.algorithm.exploration(welcome.ladder_size)[welcome.ladder_indices]
    process, highest, lowest = digest_of_peer_id(actor.peer_id), exploration.max(), exploration.min()
    text = "acting in %d environments, exploration %.4f to %.4f (process %s)"
    _log.info(text, size, highest, lowest, process)
    rules = config.algorithm.discount, game.reward_clip, game.life_loss_terminates, spread_first_slots(spec, size)
    largest = value_limits(config).observation if spec.vector_size else math.inf
    builder = SegmentBuilder(spec, size, *rules, largest)
    return seeds, builder, exploration, key


def run(config: Config, name: str, stop: StopSignal) -> int:
    """Runs the role and returns the process's exit code."""
    environment_spec = checked_description(config)
    log_reading(environment_spec)
    with open_role(config, "actor", name, stop) as role, open_actor(role, environment_spec) as actor:
        role.describe = actor.describe
        actor.run()
    return stop.exit_code


# Environments written in JAX, played many steps a call on the device of the policy ------------------------------------


STEPS_OF_A_CALL = 32  # of each environment: enough that Python's part of a call is small, and the weights new


class Rollouts:
    """Environments that are played STEPS_OF_A_CALL steps a call, on the device of the policy."""

    def __init__(self, config: Config, algorithm: Algorithm, seeds: np.ndarray, exploration: Array, key: jax.Array):
        """`seeds`: int[E]; `exploration`: float32[E]; `key`: of the policy's random numbers."""
        environment = self._environment = JaxEnvironment(config, config.environment.max_episode_frames)
        self._task, self._exploration, self._key = config.environment.task, exploration, key
        self._ids, self._step = np.arange(len(seeds), dtype=np.int32), 0
        self._keys, self._has_ended = environment_keys(seeds), False
        self._played: Any = jax.vmap(environment.begin)(self._keys)
        if caution := environment.wrong_levels(self._keys[0]):
            _log.warning("environment.task=%s: %s", self._task, caution)

        def advance(played: Any, action: jax.Array) -> Any:
            return environment.advance(played, environment.scaled(action))

        self._rollout = make_rollout(algorithm.act, advance, STEPS_OF_A_CALL)

    def start(self, params: Params) -> tuple[Any, Action]:
        """Starts the next call, without waiting for it; returns what `steps` reads."""
        self._played, seen, output = self._rollout(params, self._played, self._exploration, self._key, self._step)
        self._step = (self._step + STEPS_OF_A_CALL) % 2**30  # an int32 in the policy
        return seen, output

    def steps(self, started: tuple[Any, Action]) -> Iterator[tuple[Step, Action]]:
        """Yields each step of all environments and the actions chosen for it. Raises BrokenEnvironment."""
        seen, output = jax.tree.map(np.array, started)
        parts = [seen.reward, *named_parts(seen.observation).values()]
        if not all(np.isfinite(part).all() for part in parts):
            what = "it returned a reward or an observation that is not finite"
            raise BrokenEnvironment(f"environment.task={self._task}: {what}")
        if not self._has_ended and (seen.terminated | seen.truncated).any():
            self._has_ended = True
            self._warn_of_resets(seen)
        for k in range(STEPS_OF_A_CALL):
            ends = seen.first[k], seen.terminated[k], seen.truncated[k]
            no_life_lost = np.zeros(self._ids.size, bool)
            observation = map_parts(itemgetter(k), seen.observation)
            step = Step(self._ids, observation, seen.reward[k], *ends, no_life_lost, seen.info[k])
            yield step, Action(*(array[k] for array in output))

    def _warn_of_resets(self, seen: Any) -> None:
        """Warns if a game ended with the first observation of the next one, from which its return would bootstrap."""
        k, i = np.argwhere(seen.terminated | seen.truncated)[0]
        key = jax.random.fold_in(self._keys[i], int(seen.calls[k, i]) - 1)  # of the step that ended it
        if self._environment.resets_with(key, map_parts(itemgetter((k, i)), seen.observation)):
            what = "step returns what reset does at the end of a game, as if it reset itself"
            fix = "return the last observation, with terminated or truncated; reset is called after it"
            _log.warning("environment.task=%s: %s; %s", self._task, what, fix)
