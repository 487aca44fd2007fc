"""The actor: steps a batch of environments with the newest weights and records the transitions as segments."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

import jax
import numpy as np

from apex_jax.agent.registry import make_algorithm
from apex_jax.agent.segments import SegmentBuilder, spread_first_slots
from apex_jax.config import Config, server_name
from apex_jax.environments.environment import Environment, Episode, EpisodeTracker, segment_spec
from apex_jax.host.errors import RunError, shown
from apex_jax.links.experience_client import ExperienceClient
from apex_jax.links.weights_client import Weights, WeightsClient
from apex_jax.process import ROLE_NUMBERS, StopSignal, digest_of_run_id, new_run_id, process_rng
from apex_jax.run.metrics import RateMeter
from apex_jax.transport.addresses import addresses_of_servers
from apex_jax.transport.messages import NO_LADDER_INDICES, ActorHello, ActorStatus, ActorWelcome
from apex_jax.types import Segment, SegmentSpec
from apex_jax.workers.role import RoleContext, open_role

_log = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0  # between two log lines while the actor waits for its servers


class Actor:
    """Acts until stopped. Its thread only acts; sending and receiving run on other threads."""

    def __init__(self, role: RoleContext, spec: SegmentSpec):
        """Starts connecting to the replay server and the learner, without waiting for them."""
        self._role = role
        self._config = config = role.config
        self._spec = spec
        self._algorithm = make_algorithm(config, spec)
        like_params = self._algorithm.acting_params(jax.eval_shape(self._algorithm.init, jax.random.key(0)))
        self._addresses = addresses_of_servers(config, "experience")
        self._weights = WeightsClient(
            role.sockets,
            config.addresses.weights,
            like_params,
            config.weights_compatibility_key,
            config.away_limit_seconds,
            role.run_identity,
            config.actor.environments,
        )
        self._step_rate, self._wait_rate = RateMeter(), RateMeter()
        self._waited_seconds = 0.0  # total time blocked on the replay server
        self._steps = 0  # environment steps made, without resets
        self._steps_before = 0  # those of them made for an earlier replay server
        self._disconnects = 0  # from earlier replay servers
        self._next_metrics = 0.0
        self._in_use: Weights | None = None
        self._run_id = 0  # of this process, or of its time with one of several replay servers
        self._shard = 0  # the replay server to which this actor belongs
        self._places = NO_LADDER_INDICES  # on the ladder, at the replay server that it left
        self._stream = self._connect() if len(self._addresses) == 1 else None  # else the learner assigns one

    def run(self) -> None:
        """Acts until the process is stopped or the run is over. Raises RunError if the replay server refuses it."""
        stop = self._role.stop
        while not self._leaving(stop):
            welcome, weights = self._join(stop)
            if welcome is not None and weights is not None:
                self._act(welcome, stop)
            if self._is_reassigned:
                self._leave_shard(welcome)
        if self._stream is not None and self._stream.error is not None:
            raise self._stream.error

    def describe(self) -> dict[str, Any]:
        """Returns the actor's status without its metrics. Callable from any thread."""
        weights = self._in_use
        return {
            "run_id": digest_of_run_id(self._run_id),
            "weights_version": weights.version if weights is not None else None,
            "peers": {
                server_name(self._shard): "connecting" if self._stream is None else self._stream.peer_state,
                "learner": self._weights.peer_state,
            },
        }

    def close(self) -> None:
        """Disconnects, ends the threads and writes the last metrics."""
        if self._stream is not None:
            self._stream.close()
        self._weights.close()
        self._write_metrics()

    def _connect(self) -> ExperienceClient:
        """Starts connecting to the replay server to which this actor belongs, as a new actor."""
        config, self._run_id = self._config, new_run_id()
        self._steps_before = self._steps
        return ExperienceClient(
            self._role.sockets,
            self._addresses[self._shard],
            self._spec,
            ActorHello(self._run_id, config.compatibility_key, config.actor.environments, ladder_indices=self._places),
            max(config.actor.environments, config.actor.max_outstanding_segments),
            config.actor.overflow,
            config.away_limit_seconds if len(self._addresses) == 1 else 0.0,  # the learner assigns another server
            self._role.run_identity,
        )

    def _connect_where_assigned(self) -> None:
        """Connects to the replay server that the learner has assigned, once it has."""
        if (shard := self._weights.shard) is None:
            return
        if shard >= len(self._addresses):
            what = f"the learner assigns replay server {shard}, which is not in addresses.experience"
            raise RunError(f"{what}={shown(list(self._addresses))}: give both the same replay.servers")
        self._shard = shard
        self._stream = self._connect()
        _log.info("joining replay server %d of %d at %s", shard + 1, len(self._addresses), self._addresses[shard])

    @property
    def _is_reassigned(self) -> bool:
        """Returns whether the learner has assigned another replay server: this one is gone, or has too many actors."""
        return len(self._addresses) > 1 and self._stream is not None and self._weights.shard != self._shard

    def _leave_shard(self, welcome: ActorWelcome | None) -> None:
        """Leaves a replay server, as if this actor ended and a new one took its places on the ladder.

        So no transition is counted or stored twice. What was not stored is counted as unsent or lost with the actor.
        """
        assert self._stream is not None
        self._stream.close()
        self._disconnects += self._stream.disconnects
        self._stream = None
        if welcome is not None:
            self._places = welcome.ladder_indices

    def _join(self, stop: StopSignal) -> tuple[ActorWelcome | None, Weights | None]:
        """Waits for the welcome and the first weights; logs every PATIENCE_SECONDS which one is missing."""
        welcome, weights, next_word = None, None, time.monotonic() + PATIENCE_SECONDS
        while (welcome is None or weights is None) and not (self._leaving(stop) or self._is_reassigned):
            stop.beat()
            if self._stream is None:
                self._connect_where_assigned()
            else:
                welcome = self._stream.wait_for_welcome(0.1)
            weights = self._weights.fetch_after(weights, timeout_seconds=0.1) or weights
            if time.monotonic() >= next_word:
                is_replay = self._stream is not None and welcome is None
                missing = self._addresses[self._shard] if is_replay else self._config.addresses.weights
                _log.info("still waiting for the %s at %s", "replay server" if is_replay else "learner", missing)
                next_word += PATIENCE_SECONDS
        return welcome, weights

    def _act(self, welcome: ActorWelcome, stop: StopSignal) -> None:
        config, num_environments = self._config, len(welcome.ladder_indices)
        rng = process_rng(config.seed, ROLE_NUMBERS["actor"], welcome.incarnation)
        key = jax.random.key(int(rng.integers(2**31)))
        exploration = self._algorithm.exploration(welcome.ladder_size)[welcome.ladder_indices]
        process, highest, lowest = digest_of_run_id(self._run_id), exploration.max(), exploration.min()
        text = "acting in %d environments, exploration %.4f to %.4f (process %s)"
        _log.info(text, num_environments, highest, lowest, process)
        environment = Environment(
            config,
            self._spec,
            rng.integers(2**31, size=num_environments),
            config.environment.max_episode_frames,
            config.actor.environment_threads,
            config.actor.batch_size,
        )
        builder = SegmentBuilder(
            self._spec,
            num_environments,
            config.algorithm.discount,
            config.environment.reward_clip,
            config.environment.life_loss_terminates,
            spread_first_slots(self._spec, num_environments),
            config.algorithm.value_rescaling,
        )
        tracker = EpisodeTracker(num_environments)
        self._next_metrics, call = time.monotonic() + config.metrics_interval_seconds, 0
        while not (self._leaving(stop) or self._is_reassigned):
            stop.beat()
            step = environment.receive()
            weights = self._newest_weights()
            output = self._algorithm.act(weights.params, step.observation, exploration[step.env_id], key, call)
            environment.send(np.asarray(output.action), step.env_id)  # environments step during the rest of the loop
            call = (call + 1) % 2**31  # wraps around: an int32 in the jitted policy
            segments = builder.add(step, *map(np.asarray, output))
            self._steps += int(np.count_nonzero(~step.first))
            self.stream.produced = self._steps - self._steps_before  # each step is a transition
            self._send(segments, stop)
            self._report(tracker.add(step), exploration)
            self._write_metrics_when_due()
        environment.close()

    def _leaving(self, stop: StopSignal) -> bool:
        return stop.is_set() or (self._stream is not None and self._stream.finished.is_set())

    @property
    def stream(self) -> ExperienceClient:
        """The link to the replay server, which there is while the actor acts."""
        assert self._stream is not None
        return self._stream

    def _newest_weights(self) -> Weights:
        self._in_use = self._weights.fetch_after(self._in_use) or self._in_use
        assert self._in_use is not None  # `_join` has waited for the first
        return self._in_use

    def _send(self, segments: list[Segment], stop: StopSignal) -> None:
        for segment in segments:
            if not self._put_in_time(segment, stop):
                return

    def _put_in_time(self, segment: Segment, stop: StopSignal) -> bool:
        """Waits until the stream accepts a segment; returns False if the actor must stop first."""
        while not self._put(segment):
            if self._leaving(stop) or self._is_reassigned:
                return False
            stop.beat()
            self._newest_weights()  # otherwise, the actor would continue with those that it had when it was blocked
            self._write_metrics_when_due()
        return True

    def _put(self, segment: Segment) -> bool:
        started = time.monotonic()
        is_taken = self.stream.put(segment, self._steps - self._steps_before, timeout_seconds=0.2)
        self._waited_seconds += time.monotonic() - started
        return is_taken

    def _report(self, episodes: list[Episode], exploration: np.ndarray) -> None:
        if episodes:
            self.stream.put_episodes(
                exploration[[episode.env_id for episode in episodes]],
                np.array([episode.episode_return for episode in episodes], np.float32),
                np.array([episode.steps for episode in episodes], np.int32),
            )

    def _write_metrics_when_due(self) -> None:
        if time.monotonic() >= self._next_metrics:
            self._next_metrics = time.monotonic() + self._config.metrics_interval_seconds
            self._write_metrics()

    def _write_metrics(self) -> None:
        now, weights = time.monotonic(), self._in_use
        if weights is None:  # no step yet
            return
        steps_per_second = self._step_rate.update(self._steps)
        if self._stream is not None:
            self._stream.status = ActorStatus(self._run_id, steps_per_second, weights.version)
        values = {
            "actor/environment_steps": self._steps,
            "actor/steps_per_second": steps_per_second,
            "actor/wait_seconds_share": min(1.0, self._wait_rate.update(self._waited_seconds)),
            "actor/replay_disconnects": self._disconnects + (self._stream.disconnects if self._stream else 0),
            "actor/weights_age_seconds": now - weights.published_seconds,
        }
        dropped = (self._stream.dropped.copy() if self._stream else Counter()) + self._weights.dropped.copy()
        self._role.write_metrics(weights.environment_steps, values, dropped)


def run(config: Config, name: str, stop: StopSignal) -> int:
    """Runs the role and returns the process's exit code."""
    with open_role(config, "actor", name, stop) as role:
        actor = Actor(role, segment_spec(config))
        role.describe = actor.describe
        try:
            actor.run()
        finally:
            actor.close()
    return stop.exit_code
