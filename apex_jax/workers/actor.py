"""The actor: steps a batch of environments with the newest weights and records the transitions as segments."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np

from apex_jax.agent.algorithm import Action, Algorithm
from apex_jax.agent.registry import make_algorithm
from apex_jax.agent.segments import SegmentBuilder, spread_first_slots
from apex_jax.config import Config, server_name
from apex_jax.environments.environment import Episode, EpisodeTracker, VectorEnvironment, log_reading
from apex_jax.host.errors import RunError, short_repr
from apex_jax.links.experience_client import ExperienceClient
from apex_jax.links.weights_client import Weights, WeightsClient
from apex_jax.process import ROLE_NUMBERS, StopSignal, digest_of_peer_id, new_peer_id, process_rng
from apex_jax.run.metrics import RateMeter
from apex_jax.segment_codec import value_limits
from apex_jax.transport.addresses import addresses_of_servers
from apex_jax.transport.messages import NO_LADDER_INDICES, ActorHello, ActorStatus, ActorWelcome, EpisodeStatistics
from apex_jax.types import Segment, SegmentSpec, Step
from apex_jax.workers.role import RoleContext, checked_spec, open_role
from apex_jax.workers.rollout import Rollouts

_log = logging.getLogger(__name__)

Plays: TypeAlias = Generator[tuple[Step, Action], None, None]
PATIENCE_SECONDS = 10.0  # between two log lines while the actor waits for its servers


@dataclass(eq=False)
class Actor:
    """The loop that acts, and its state; `open_actor` makes it. Sending and receiving run on other threads."""

    role: RoleContext
    spec: SegmentSpec
    algorithm: Algorithm
    weights: WeightsClient
    replay: Assignment
    in_use: Weights | None = None
    steps: int = 0  # environment steps made, without resets
    waited_seconds: float = 0.0  # total time blocked on the replay server
    step_rate: RateMeter = field(default_factory=RateMeter)
    wait_rate: RateMeter = field(default_factory=RateMeter)
    next_metrics: float = 0.0

    def run(self) -> None:
        """Acts until the process is stopped or the run is over. Raises RunError if the replay server refuses it."""
        while (welcome := self.replay.join()) is not None:
            for _ in self.act(welcome):
                pass

    def act(self, welcome: ActorWelcome) -> Generator[None, None, None]:
        """Acts with the ladder indices of the welcome, as long as the actor belongs to this replay server.

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
                if self.replay.must_leave:
                    return

    def _play(self, seeds: np.ndarray, exploration: np.ndarray, key: jax.Array) -> Plays:
        """Yields the steps of environments that run on the CPU, and the actions for them."""
        config, call = self.role.config, 0
        limit, threads = config.environment.max_episode_frames, config.actor.environment_threads
        environment = VectorEnvironment(config, self.spec, seeds, limit, threads, config.actor.batch_size)
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

        Waits until the client has room for them, or until the actor must leave.
        """
        client, transitions = self.replay.client, int(np.count_nonzero(~step.first))
        assert client is not None  # `join` has waited for its welcome
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
            while not self._put(client, segment):
                if self.replay.must_leave:
                    return
                self.role.stop.beat()
                self._newest_weights()  # otherwise the actor would continue with the weights from before it was blocked
                self._write_metrics_when_due()

    def _count_left_out(self, transitions: int) -> None:
        """Counts transitions of games that were left out for a number that is too large; warns of the first."""
        client = self.replay.client
        assert client is not None
        if transitions and not client.left_out:
            what = f"an observation has a number beyond {value_limits(self.role.config).observation:g}"
            fix = "scale observations, or set network.normalize_observations=true"
            _log.warning("%s: its game is left out, and what follows of this kind is only counted; %s", what, fix)
        client.left_out = transitions

    def _put(self, client: ExperienceClient, segment: Segment) -> bool:
        started = time.monotonic()
        is_taken = client.put(segment, timeout_seconds=0.2)
        self.waited_seconds += time.monotonic() - started
        return is_taken

    def _write_metrics_when_due(self) -> None:
        if time.monotonic() >= self.next_metrics:
            self.next_metrics = time.monotonic() + self.role.config.metrics_interval_seconds
            self.write_metrics()

    def write_metrics(self) -> None:
        """Writes the metrics, and reports them to the replay server; nothing before the first step."""
        now, weights, client = time.monotonic(), self.in_use, self.replay.client
        if weights is None:
            return
        steps_per_second = self.step_rate.update(self.steps)
        if client is not None:
            client.status = ActorStatus(steps_per_second, weights.version)
        values = {
            "actor/environment_steps": self.steps,
            "actor/steps_per_second": steps_per_second,
            "actor/wait_seconds_share": min(1.0, self.wait_rate.update(self.waited_seconds)),
            "actor/replay_disconnects": self.replay.disconnects + (client.disconnects if client else 0),
            "actor/weights_age_seconds": now - weights.published_seconds,
        }
        dropped = (client.dropped.copy() if client else Counter()) + self.weights.dropped.copy()
        dropped["large_observation"] = client.left_out if client else 0
        self.role.write_metrics(weights.environment_steps, values, dropped)

    def describe(self) -> dict[str, Any]:
        """Returns the actor's status without its metrics. Callable from any thread."""
        weights, client = self.in_use, self.replay.client
        replay = "connecting" if client is None else client.peer_state
        return {
            "peer_id": digest_of_peer_id(self.replay.peer_id),
            "weights_version": weights.version if weights is not None else None,
            "weights_age_seconds": time.monotonic() - weights.published_seconds if weights is not None else None,
            "peers": {server_name(self.replay.replay_index): replay, "learner": self.weights.peer_state},
        }

    def counts(self) -> dict[str, int]:
        """Returns the frames played, and the segments that the replay server has stored. Callable from any thread."""
        client, frame_skip = self.replay.client, self.role.config.environment.frame_skip
        return {"frames": self.steps * frame_skip, "segments": client.acknowledged_segments if client else 0}


# The opening


@contextlib.contextmanager
def open_actor(role: RoleContext, spec: SegmentSpec) -> Iterator[Actor]:
    """Starts connecting to the replay server and the learner, without waiting for them.

    On leaving, disconnects, ends the threads and writes the last metrics.
    """
    config = role.config
    algorithm = make_algorithm(config, spec)
    like_params = algorithm.acting_params(jax.eval_shape(algorithm.init, jax.random.key(0)))
    weights = WeightsClient(
        role.sockets,
        config.addresses.weights,
        like_params,
        config.weights_compatibility_key,
        config.away_limit_seconds,
        role.run_identity,
        config.actor.environments,
    )
    replay = Assignment(role, spec, weights)
    actor = Actor(role, spec, algorithm, weights, replay)
    try:
        yield actor
    finally:
        if replay.client is not None:
            replay.client.close()
        weights.close()
        actor.write_metrics()


def _begin(actor: Actor, welcome: ActorWelcome) -> tuple[np.ndarray, SegmentBuilder, np.ndarray, jax.Array]:
    """Returns the environments' seeds int[N], segment builder and exploration float32[N], and a key for actions."""
    config, spec, game, size = actor.role.config, actor.spec, actor.role.config.environment, len(welcome.ladder_indices)
    rng = process_rng(config.seed, ROLE_NUMBERS["actor"], welcome.actor_number)
    key, seeds = jax.random.key(int(rng.integers(2**31))), rng.integers(2**31, size=size)
    exploration = actor.algorithm.exploration(welcome.ladder_size)[welcome.ladder_indices]
    process, highest, lowest = digest_of_peer_id(actor.replay.peer_id), exploration.max(), exploration.min()
    text = "acting in %d environments, exploration %.4f to %.4f (process %s)"
    _log.info(text, size, highest, lowest, process)
    rules = config.algorithm.discount, game.reward_clip, game.life_loss_terminates, spread_first_slots(spec, size)
    largest = value_limits(config).observation if spec.frame_dtype == "float32" else math.inf
    builder = SegmentBuilder(spec, size, *rules, config.algorithm.value_rescaling, largest)
    return seeds, builder, exploration, key


class Assignment:
    """Joins the only replay server, or the one of several that the learner assigns; leaves it for another one."""

    def __init__(self, role: RoleContext, spec: SegmentSpec, weights: WeightsClient):
        self._role, self._spec, self._weights = role, spec, weights
        self._addresses = addresses_of_servers(role.config, "experience")
        self.replay_index = 0  # the replay server to which this actor belongs
        self._ladder_indices = NO_LADDER_INDICES  # at the replay server that it left
        self.disconnects = 0  # from earlier replay servers
        self.peer_id = 0  # of this process, or of its time with one of several replay servers
        self.client: ExperienceClient | None = None

    @property
    def must_leave(self) -> bool:
        """Whether the run is over, or the actor belongs to another replay server."""
        return self._is_over or self._assigned != self.replay_index

    def join(self) -> ActorWelcome | None:
        """Waits for the welcome of a replay server and the first weights; returns None once the run is over.

        Logs every PATIENCE_SECONDS which one is missing. Raises RunError if the replay server refuses this actor.
        """
        welcome, weights, next_word = None, None, time.monotonic() + PATIENCE_SECONDS
        while not self._is_over and (welcome is None or weights is None):
            self._role.stop.beat()
            replay_index = self._assigned
            if self.client is not None and replay_index != self.replay_index:
                self._leave(self.client)
            if self.client is None and replay_index is not None:
                self.client = self._connect(replay_index)
            welcome = self.client.wait_for_welcome(0.1) if self.client is not None else None
            weights = self._weights.fetch_after(weights, timeout_seconds=0.1) or weights
            if time.monotonic() >= next_word:
                is_replay = self.client is not None and welcome is None
                missing = self._addresses[self.replay_index] if is_replay else self._role.config.addresses.weights
                _log.info("still waiting for the %s at %s", "replay server" if is_replay else "learner", missing)
                next_word += PATIENCE_SECONDS
        if self.client is not None and self.client.error is not None:
            raise self.client.error
        return welcome if weights is not None else None

    @property
    def _is_over(self) -> bool:
        return self._role.stop.is_set() or (self.client is not None and self.client.finished.is_set())

    @property
    def _assigned(self) -> int | None:
        """The replay server assigned by the learner; a new one if the actor's own is gone or crowded."""
        return self._weights.replay_index if len(self._addresses) > 1 else 0

    def _leave(self, client: ExperienceClient) -> None:
        """Leaves a replay server, as if this actor ended and a new one took its places on the ladder.

        So no transition is counted or stored twice. Steps in segments that were not stored count as unsent or lost.
        """
        client.close()
        if (welcome := client.wait_for_welcome(0.0)) is not None:
            self._ladder_indices = welcome.ladder_indices
        self.disconnects += client.disconnects
        self.client = None

    def _connect(self, replay_index: int) -> ExperienceClient:
        """Starts connecting to a replay server, as a new actor."""
        if replay_index >= len(self._addresses):
            what = f"the learner assigns replay server {replay_index}, which is not in addresses.experience"
            raise RunError(f"{what}={short_repr(list(self._addresses))}: give both the same replay.servers")
        is_alone, address = len(self._addresses) == 1, self._addresses[replay_index]
        if not is_alone:
            _log.info("joining replay server %d of %d at %s", replay_index + 1, len(self._addresses), address)
        config, size = self._role.config, self._role.config.actor.environments
        self.replay_index, self.peer_id = replay_index, new_peer_id()
        return ExperienceClient(
            self._role.sockets,
            address,
            self._spec,
            ActorHello(self.peer_id, config.compatibility_key, size, ladder_indices=self._ladder_indices),
            max(size, config.actor.max_outstanding_segments),
            config.actor.overflow,
            config.away_limit_seconds if is_alone else 0.0,  # the learner assigns another server
            self._role.run_identity,
        )


def run(config: Config, name: str, stop: StopSignal) -> int:
    """Runs the role and returns the process's exit code."""
    spec = checked_spec(config)
    log_reading(config)
    with open_role(config, "actor", name, stop) as role, open_actor(role, spec) as actor:
        role.describe, role.counts = actor.describe, actor.counts
        actor.run()
    return stop.exit_code
