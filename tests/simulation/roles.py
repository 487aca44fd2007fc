"""The roles as simulated processes: the real clients and servers, driven by small models of actor and learner."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from apex_jax.links.connection import LinkEnd
from apex_jax.links.experience_client import ExperienceClient
from apex_jax.links.sampling_client import Received, SamplingClient, Segments
from apex_jax.links.weights_client import Weights, WeightsClient
from apex_jax.links.weights_server import WeightsServer
from apex_jax.run.identity import RunIdentity
from apex_jax.transport.messages import ActorHello, ActorStatus, LearnerHello
from apex_jax.transport.params_codec import architecture_of
from apex_jax.workers.replay_server import ReplayServer
from tests.rigs.links import SPEC, TRANSITIONS
from tests.simulation.clock import Task
from tests.simulation.processes import InOrder, Process
from tests.simulation.segments import priority_of, segment_of

PARAMS = {"kernel": np.zeros(40, np.float32)}
CALLS_IN_FLIGHT = 2


class ReplayProcess(Process):
    """The replay server."""

    def __init__(self, fleet: Any) -> None:
        self.config = fleet.config_of_replay()
        super().__init__(fleet, "replay", "host-replay")

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
            self.fleet.disk.power_loss(Path(self.config.directory, "replay"))

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
        end = LinkEnd(self.context, fleet.address("weights"), self.identity)
        key = fleet.config.weights_compatibility_key
        self.weights = WeightsServer(end, self.peer_id, first_version, key, architecture_of(PARAMS))
        hello = LearnerHello(
            self.peer_id,
            fleet.config.compatibility_key,
            0,
            fleet.config.learner.updates_per_call,
            fleet.config.learner.batch_size,
            self.identity.name or f"{clock.rng.getrandbits(64):016x}",
            not self.identity.name,
        )
        end = LinkEnd(self.context, fleet.address("sampling"), self.identity)
        self.replay = SamplingClient(end, SPEC, hello, fleet.capacity_segments, 4, 0.4)
        self.store = np.full(fleet.capacity_segments, -1, np.int64)
        self.in_flight: deque[tuple[Received, np.ndarray, float]] = deque()
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
            self.fleet.checkpoint = self.updates, self.weights.version
        if item is not None and len(self.in_flight) < CALLS_IN_FLIGHT:
            return 0.001
        return max(0.001, self.in_flight[0][2] - now) if self.in_flight else None

    def _consume(self, item: Received, now: float) -> None:
        content = item.content
        if isinstance(content, Segments):
            self.store[content.ring_slots] = content.frames[:, 0, 0]
            self.replay.consumed(item)
            return
        numbers = self.store[content.indices.ravel() // SPEC.slots]
        self.fleet.oracle.on_batches(self, content.drawn, numbers)
        begin = max(now, self.in_flight[-1][2]) if self.in_flight else now
        self.in_flight.append((item, numbers, begin + self.clock.between(0.5, 1.5) * self.fleet.update_seconds))
        self.updates += len(content.indices)

    def _collect(self) -> None:
        item, numbers, _ = self.in_flight.popleft()
        change = self.clock.rng.randint(1, 3)
        self.replay.update_priorities(item, (priority_of(numbers) + 0.25 * change).astype(np.float32))
        self.replay.consumed(item)
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

    def connect_weights(self) -> None:
        self.identity = RunIdentity(self.fleet.directory_of(self.name))
        self.in_use: Weights | None = None
        end = LinkEnd(self.context, self.fleet.address("weights"), self.identity)
        self.weights = WeightsClient(end, PARAMS, self.fleet.config.weights_compatibility_key)

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
        self.connect_weights()

    def turn(self, now: float) -> float | None:
        self.fetch()
        return self.clock.between(2.0, 6.0)

    def leave(self) -> None:
        self.weights.close()


class ActorProcess(WeightsUser):
    """An actor: puts numbered segments as fast as it is allowed to, at most one in `segment_seconds`."""

    def __init__(self, fleet: Any, number: int) -> None:
        super().__init__(fleet, f"actor{number}", f"host-actor{number // 2}")

    def start(self) -> None:
        self._waiting: Any = None  # the segment that could not be put yet
        self.connect_weights()
        self.peer_id = self.fleet.peer_id()
        self.steps = 0
        end = LinkEnd(self.context, self.fleet.address("experience"), self.identity)
        hello = ActorHello(self.peer_id, self.fleet.config.compatibility_key, self.fleet.environments)
        self.stream = ExperienceClient(end, SPEC, hello, 4, self.fleet.overflow)
        self.fleet.oracle.on_actor(self.peer_id, self.stream)
        self.stream_task: Task = self.stream._thread.task  # type: ignore[attr-defined]

    def turn(self, now: float) -> float | None:
        self.fetch()
        stream = self.stream
        if stream.error is not None:
            raise stream.error
        if stream.finished.is_set():
            self.stop()
            return None
        if self.in_use is None or stream.wait_for_welcome(0.0) is None:
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

    def leave(self) -> None:
        self.stream.close()
        self.weights.close()
