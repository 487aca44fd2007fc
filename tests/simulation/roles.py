"""The roles as simulated processes: the real clients and servers, driven by small models of actor and learner."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from apex_jax.config import server_name
from apex_jax.links.experience_client import ExperienceClient
from apex_jax.links.replay_servers import Merged, ReplayServers
from apex_jax.links.sampling_client import Segments
from apex_jax.links.weights_client import Weights, WeightsClient
from apex_jax.links.weights_server import WeightsServer
from apex_jax.run.identity import RunIdentity
from apex_jax.transport.messages import NO_LADDER_INDICES, ActorHello, ActorStatus, LearnerHello
from apex_jax.transport.params_codec import architecture_of
from apex_jax.workers.replay_server import ReplayServer
from tests.rigs.links import SPEC, TRANSITIONS
from tests.simulation.clock import Task
from tests.simulation.processes import InOrder, Process
from tests.simulation.segments import priority_of, segment_of

PARAMS = {"kernel": np.zeros(40, np.float32)}  # three pieces of the simulated size
CALLS_IN_FLIGHT = 2


class ReplayProcess(Process):
    """A replay server."""

    def __init__(self, fleet: Any, index: int) -> None:
        self.index = index
        self.config = fleet.config_of(index)
        super().__init__(fleet, f"replay{index}", f"host-replay{index}")

    def start(self) -> None:
        role: Any = SimpleNamespace(
            config=self.config, sockets=self.context, run_identity=RunIdentity(self.config.directory)
        )
        self.server = ReplayServer(role, SPEC)
        self.server.experience._unanswered = InOrder()  # type: ignore[assignment]
        self._next_check = 0.0
        self.fleet.oracle.on_restored(self)

    def turn(self, now: float) -> float | None:
        server = self.server
        server.serve(now)
        if now >= self._next_check:
            self._next_check = now + 1.0
            server.experience.evict_dead_peers(now)
            server.sampling.evict_dead_peers(now)
            server.replay.snapshot_if_due(now)
        if server.sampling.finished is not None:
            server.experience.finish(server.sampling.finished)
        self.fleet.oracle.after_turn(self)
        return 0.001 if any(socket.turns for socket in self.sockets if hasattr(socket, "turns")) else None

    def died(self) -> None:
        if (server := getattr(self, "server", None)) is not None:
            self.fleet.oracle.on_death(self)
            log = server.replay.journal.log
            for descriptor in (log._descriptor, log._lock):
                if descriptor is not None:
                    os.close(descriptor)
            log._descriptor = log._lock = None
        if not self.has_power:
            self.fleet.disk.power_loss(Path(self.config.directory, server_name(self.index)))

    def leave(self) -> None:
        self.server.replay.finish(self.clock.now)


class LearnerProcess(Process):
    """A learner: keeps the number of the segment in each slot of its frame store."""

    def __init__(self, fleet: Any) -> None:
        super().__init__(fleet, "learner", "host-learner")

    def start(self) -> None:
        fleet, clock = self.fleet, self.clock
        self.peer_id = fleet.peer_id()
        self.updates, first_version = fleet.checkpoint
        self.identity = RunIdentity(self.fleet.directory_of(self.name))
        self.weights = WeightsServer(
            self.context,
            fleet.address("weights"),
            self.peer_id,
            first_version,
            fleet.config.weights_compatibility_key,
            architecture_of(PARAMS),
            self.identity,
            fleet.servers,
        )
        hello = LearnerHello(
            self.peer_id,
            fleet.config.compatibility_key,
            0,
            fleet.config.learner.updates_per_call,
            fleet.config.learner.batch_size,
            self.identity.name or f"{clock.rng.getrandbits(64):016x}",
            not self.identity.name,
        )
        self.replay = ReplayServers(
            self.context,
            tuple(fleet.address("sampling", index) for index in range(fleet.servers)),
            SPEC,
            hello,
            fleet.capacity_segments,
            4,
            0.4,
            np.random.default_rng(clock.rng.getrandbits(32)),
            fleet.config.replay.min_size_to_sample,
            run=self.identity,
        )
        self.store = np.full(fleet.servers * fleet.capacity_segments, -1, np.int64)
        self.in_flight: deque[tuple[Merged, np.ndarray, float]] = deque()
        self._next_publish = self._next_save = clock.now

    def turn(self, now: float) -> float | None:
        item = self.replay.next(0.0)
        if item is not None:
            self._consume(item, now)
        if self.in_flight and now >= self.in_flight[0][2]:
            self._collect()
        if now >= self._next_publish and self.identity.name and not self.fleet.is_over:
            self._next_publish = now + 5.0
            self._publish()
        if now >= self._next_save:
            self._next_save = now + 20.0
            self.weights.placement.closed = self.replay.gone(now)
            self.fleet.checkpoint = self.updates, self.weights.version
        if item is not None and len(self.in_flight) < CALLS_IN_FLIGHT:
            return 0.001
        return max(0.001, self.in_flight[0][2] - now) if self.in_flight else None

    def _consume(self, merged: Merged, now: float) -> None:
        content = merged.content
        if isinstance(content, Segments):
            self.store[content.ring_slots] = content.frames[:, 0, 0]
            self.replay.consumed(merged)
            return
        numbers = self.store[content.indices.ravel() // SPEC.slots]
        self.fleet.oracle.on_batches(self, merged, numbers)
        begin = max(now, self.in_flight[-1][2]) if self.in_flight else now
        self.in_flight.append((merged, numbers, begin + self.clock.between(0.5, 1.5) * self.fleet.update_seconds))
        self.updates += len(content.indices)

    def _collect(self) -> None:
        merged, numbers, _ = self.in_flight.popleft()
        change = self.clock.rng.randint(1, 3)
        self.replay.update_priorities(merged, (priority_of(numbers) + 0.25 * change).astype(np.float32))
        self.replay.consumed(merged)
        self.fleet.oracle.updates += 1

    def finish(self) -> None:
        """Ends the run, as a learner does that has reached its limit."""
        self._publish(final=True)
        self.replay.finish("the limit is reached")

    def _publish(self, final: bool = False) -> None:
        value = float(self.fleet.oracle.new_weights())
        self.weights.publish({"kernel": np.full(40, value, np.float32)}, self.updates, 0, final)
        self.fleet.oracle.on_published(self, value)

    def leave(self) -> None:
        self.fleet.checkpoint = self.updates, self.weights.version
        self.replay.close()
        self.weights.close()


class WeightsUser(Process):
    """What actors and the evaluator share."""

    def connect_weights(self, environments: int) -> None:
        self.identity = RunIdentity(self.fleet.directory_of(self.name))
        self.in_use: Weights | None = None
        self.weights = WeightsClient(
            self.context,
            self.fleet.address("weights"),
            PARAMS,
            self.fleet.config.weights_compatibility_key,
            run=self.identity,
            environments=environments,
        )

    def fetch(self) -> None:
        newer = self.weights.fetch_after(self.in_use)
        if newer is not None:
            self.fleet.oracle.on_weights(self, newer, self.in_use)
            self.in_use = newer


class EvaluatorProcess(WeightsUser):
    """Takes the newest weights from time to time."""

    def __init__(self, fleet: Any) -> None:
        super().__init__(fleet, "evaluator", "host-learner")

    def start(self) -> None:
        self.connect_weights(0)

    def turn(self, now: float) -> float | None:
        self.fetch()
        return self.clock.between(2.0, 6.0)

    def leave(self) -> None:
        self.weights.close()


class ActorProcess(WeightsUser):
    """An actor: puts numbered segments as fast as it is allowed to, at most one in `segment_seconds`."""

    def __init__(self, fleet: Any, number: int) -> None:
        self.stream: ExperienceClient | None = None
        self.environments = fleet.environments
        super().__init__(fleet, f"actor{number}", f"host-actor{number // 2}")

    def start(self) -> None:
        self._places: np.ndarray = NO_LADDER_INDICES
        self._replay_index = 0
        self.acknowledged = 0  # transitions, at replay servers that it has left
        self._waiting: Any = None  # the segment that could not be put yet
        self.connect_weights(self.environments)
        if self.fleet.servers == 1:
            self._connect()

    def _connect(self) -> None:
        self.peer_id = self.fleet.peer_id()
        self.steps = 0
        self.stream = ExperienceClient(
            self.context,
            self.fleet.address("experience", self._replay_index),
            SPEC,
            ActorHello(
                self.peer_id, self.fleet.config.compatibility_key, self.environments, ladder_indices=self._places
            ),
            4,
            self.fleet.overflow,
            run=self.identity,
        )
        self.fleet.oracle.on_actor(self.peer_id, self.stream, self._replay_index)
        self.stream_task: Task = self.stream._thread.task  # type: ignore[attr-defined]

    def turn(self, now: float) -> float | None:
        self.fetch()
        if self.fleet.servers > 1 and self.weights.replay_index is not None and self._is_reassigned():
            self._move(self.weights.replay_index)
        stream = self.stream
        if stream is not None and stream.error is not None:
            raise stream.error
        if stream is not None and stream.finished.is_set():
            self.stop()
            return None
        if stream is None or self.in_use is None or stream.wait_for_welcome(0.0) is None:
            return 0.1
        if self._waiting is None:
            self._waiting = segment_of(self.fleet.oracle.new_segment(self.peer_id))
            self.steps += TRANSITIONS
            stream.produced = self.steps
        if not stream.put(self._waiting, 0.0):
            return 0.2
        self._waiting = None
        self.stream_task.wake(self.clock.between(0.0, 0.02))
        stream.status = ActorStatus(1.0, self.in_use.version)
        return self.clock.between(0.5, 1.5) * self.fleet.segment_seconds

    def _is_reassigned(self) -> bool:
        return self.stream is None or self.weights.replay_index != self._replay_index

    def _move(self, replay_index: int) -> None:
        if self.stream is not None:
            welcome = self.stream.wait_for_welcome(0.0)
            self.stream.close()
            self.acknowledged += self.stream.acknowledged
            self._places = welcome.ladder_indices if welcome is not None else self._places
            self._waiting = None
        self._replay_index = replay_index
        self._connect()

    def leave(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.weights.close()
