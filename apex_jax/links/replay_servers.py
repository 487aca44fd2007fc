"""The learner's side of the sampling links to all replay servers: one stream of segments and batches."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import zmq

from apex_jax.host.errors import RunError
from apex_jax.links.sampling_client import SEGMENTS_WINDOW, Received, SamplingClient, Segments
from apex_jax.replay.fractions import counts_of, fractions_of, importance_weights
from apex_jax.run.identity import RunIdentity
from apex_jax.segment_codec import NO_LIMITS, ValueLimits
from apex_jax.transport.messages import IndexBatches, LearnerHello
from apex_jax.types import MAX_STREAMED_SEGMENTS, SegmentSpec

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
GONE_SECONDS = 60.0  # a restart of a server on its machine takes less


class Batches(NamedTuple):
    """K batches of B transitions, drawn from the servers in proportion to priority^alpha."""

    indices: np.ndarray  # int32[K, B], in a frame store in which the segments of server s begin at segment s x C
    weights: np.ndarray  # float32[K, B], importance weights; the largest of each batch is 1
    samples_per_insert: float  # mean of the servers drawn from, weighted by their sizes
    age_seconds: float  # mean over the drawn transitions since their insertion


class Contribution(NamedTuple):
    """The item of one server in a `Merged`."""

    server: int
    item: Received
    where: np.ndarray | slice  # the elements of [K x B] that it fills


class Merged(NamedTuple):
    """Content for the learner to consume, and the servers that it comes from."""

    content: Segments | Batches
    parts: tuple[Contribution, ...]


@dataclass(eq=False)
class Plan:
    """A group of batches that was requested from some servers."""

    fractions: np.ndarray  # float64[S], of each server in each batch
    counts: np.ndarray  # int32[K, S], transitions asked for
    answers: dict[int, Received] = field(default_factory=dict)  # by server


@dataclass(eq=False)
class ServerState:
    """One replay server, as of the items that the learner has taken."""

    number: int
    client: SamplingClient
    joined_seconds: float  # when it was last joined
    epoch: int = 0  # of the client, when this record began
    total_priority: float = 0.0
    size_transitions: int = 0
    allowed_samples: int = 0
    asked: deque[Plan] = field(default_factory=deque)  # not answered yet, in the order of the answers
    holds: Plan | None = None  # plan whose answer waits for other servers, and later items behind it

    @property
    def is_joined(self) -> bool:
        """Returns whether it is connected."""
        return self.client.peer_state == "joined" and self.epoch == self.client.epoch

    def can_give(self, transitions: int) -> bool:
        """Returns whether its rate limiter allows this many draws beside those that it was asked for."""
        pending = sum(int(plan.counts[:, self.number].sum()) for plan in self.asked)
        return self.is_joined and self.total_priority > 0 and self.allowed_samples - pending >= transitions


class ReplayServers:
    """Joins every replay server, asks each for its fraction of a group of batches, and merges the answers.

    The learner calls `next` for an item, `consumed` when it has processed the item, and `update_priorities`, as if
    there were one server. An answer waits for those of the other servers, and later items of its server wait behind it,
    so that the frame store always equals the replay from which each server drew.

    No batch takes transitions from a server that is lost or that its rate limiter stops; the other servers give more.
    It takes some again once the server has sent its live segments and its limiter allows it. A lone server is asked in
    any case, and answers when it can.
    """

    def __init__(
        self,
        context: zmq.Context,
        addresses: tuple[str, ...],
        spec: SegmentSpec,
        hello: LearnerHello,
        capacity_segments: int,
        groups: int,
        beta: float,
        rng: np.random.Generator,
        min_size_to_sample: int = 1,
        away_limit_seconds: float = 0.0,
        run: RunIdentity | None = None,
        devices: int = 1,
        limits: ValueLimits = NO_LIMITS,
    ):
        """Connects. `capacity_segments`: of each server; `groups`: most groups of batches pending or in process.

        `beta`: exponent of the importance weights; `rng`: for the rounding of counts; `min_size_to_sample`: transitions
        of all servers together at which learning begins; `away_limit_seconds`: how long all servers may be unreachable
        before a RunError is raised, 0 = forever; `run`, `limits`: see `SamplingClient`; `devices`: of the learner, each
        of which has the segments of equally many servers, in their order, and gets an equal fraction of each batch.
        """
        self._devices = devices
        self._hello = hello
        self._offset = capacity_segments  # segments of the frame store between the first ones of two servers
        self._frame_slots = spec.slots
        self._groups = groups
        self._beta = beta
        self._rng = rng
        self._min_size = min_size_to_sample
        self._away_limit = away_limit_seconds
        self._has_begun = False
        self._arrived = threading.Event()
        self._plans: deque[Plan] = deque()  # without those of which a server was lost before it answered; oldest first
        self._in_process = 0  # groups returned by `next` and not consumed
        self._next = 0  # server that is read next
        self._num_joined = len(addresses)  # as last logged
        window = max(MAX_STREAMED_SEGMENTS, SEGMENTS_WINDOW // len(addresses))
        limit = away_limit_seconds if len(addresses) == 1 else 0.0
        self.servers = [
            ServerState(
                number,
                SamplingClient(
                    context,
                    address,
                    spec,
                    hello._replace(replay_index=number),
                    capacity_segments,
                    groups,
                    limit,
                    run,
                    window,
                    self._arrived,
                    limits,
                ),
                time.monotonic(),
            )
            for number, address in enumerate(addresses)
        ]

    @property
    def peer_state(self) -> str:
        """State of the connections: "joined" if at least one server is joined, else that of the first."""
        states = self.peer_states
        return "joined" if "joined" in states else states[0]

    @property
    def peer_states(self) -> list[str]:
        """State of each server, see `Connection`."""
        return [server.client.peer_state for server in self.servers]

    @property
    def disconnects(self) -> int:
        """Losses of replay servers that had welcomed this learner."""
        return sum(server.client.disconnects for server in self.servers)

    @property
    def dropped(self) -> Counter[str]:
        """Counts of refusals and of unusable data from the servers, by reason."""
        return sum((server.client.dropped.copy() for server in self.servers), Counter[str]())

    @property
    def is_finish_received(self) -> bool:
        """Returns whether every server has acknowledged `finish`."""
        return all(server.client.is_finish_received.is_set() for server in self.servers)

    def gone(self, now_seconds: float) -> frozenset[int]:
        """Returns the servers that have been away for GONE_SECONDS, whose actors should move on."""
        away = (server.number for server in self.servers if now_seconds - server.joined_seconds > GONE_SECONDS)
        return frozenset(away)

    def count_steps(self, environment_steps: int) -> None:
        """Sets the environment steps of the whole run; each server receives them with the next message."""
        for server in self.servers:
            server.client.environment_steps = environment_steps

    def next(self, timeout_seconds: float) -> Merged | None:
        """Returns the next item to consume, None after the timeout. Raises RunError once a link has failed."""
        until = time.monotonic() + timeout_seconds
        while True:
            self._arrived.clear()
            self._look_at_connections()
            if (merged := self._take()) is not None:
                return merged
            self._give_up_answers()
            self._ask()
            left_seconds = until - time.monotonic()
            if left_seconds <= 0:
                return None
            self._arrived.wait(min(left_seconds, POLL_SECONDS))

    def consumed(self, merged: Merged) -> None:
        """Returns the credit of processed segments, or asks for as many batches as were processed."""
        if isinstance(merged.content, Segments):
            (part,) = merged.parts
            self.servers[part.server].client.consumed(part.item)
        else:
            self._in_process -= 1
            self._ask()

    def update_priorities(self, merged: Merged, priorities: np.ndarray) -> None:
        """Sends each server the new priorities, float32[K, B], of its transitions."""
        flat = priorities.ravel()
        for part in merged.parts:
            if (of_server := flat[part.where]).size:
                self.servers[part.server].client.update_priorities(part.item, of_server)

    def finish(self, reason: str) -> None:
        """Sends every server a `Finish`, repeatedly until `is_finish_received`."""
        for server in self.servers:
            server.client.finish(reason)

    def close(self) -> None:
        """Sends goodbyes and ends the threads."""
        for server in self.servers:
            server.client.close()

    # Asking

    def _ask(self) -> None:
        """Asks for as many groups of batches as may be pending, if there are servers that can give them."""
        batches, size = self._hello.batches_at_once, self._hello.batch_size
        while len(self._plans) + self._in_process < self._groups:
            totals = self._totals(batches * size)
            if not totals.reshape(self._devices, -1).any(axis=1).all():  # each device needs its fraction
                return
            fractions = fractions_of(totals, self._devices)
            counts = counts_of(fractions, size, self._rng.random(batches))
            plan = Plan(fractions, counts)
            self._plans.append(plan)
            for number in np.flatnonzero(totals).tolist():
                server = self.servers[number]
                server.asked.append(plan)
                server.client.ask(counts[None, :, number], server.epoch)

    def _totals(self, transitions: int) -> np.ndarray:
        """Returns float64[S], the priorities of the servers to draw from, 0 for the others."""
        if len(self.servers) == 1:
            return np.array([self.servers[0].is_joined], np.float64)
        joined = [server for server in self.servers if server.is_joined]
        enough = sum(server.size_transitions for server in joined) >= self._min_size
        self._has_begun |= enough or all(server.allowed_samples for server in joined)  # full rings may hold fewer
        if not self._has_begun:
            return np.zeros(len(self.servers))
        return np.array([server.total_priority * server.can_give(transitions) for server in self.servers])

    # Connections

    def _look_at_connections(self) -> None:
        for server in self.servers:
            if server.epoch != server.client.epoch:
                self._rejoin(server, server.client.epoch)
        if len(self.servers) == 1:
            return
        now, joined = time.monotonic(), [server for server in self.servers if server.is_joined]
        for server in joined:
            server.joined_seconds = now
        if len(joined) != self._num_joined:
            self._num_joined = len(joined)
            _log.info("%d of %d replay servers are joined", len(joined), len(self.servers))
        away_seconds = now - max(server.joined_seconds for server in self.servers)
        if 0 < self._away_limit < away_seconds:
            what = f"all replay servers have been away for {away_seconds:.0f} s"
            raise RunError(f"{what}: start them, or raise away_limit_seconds (0 = wait for ever)")

    def _rejoin(self, server: ServerState, epoch: int) -> None:
        """Discards the requests of an earlier connection, which the server does not answer."""
        for plan in [*server.asked, *([server.holds] if server.holds else [])]:
            self._void(plan)
        server.asked.clear()
        server.epoch = epoch
        server.total_priority, server.size_transitions, server.allowed_samples = 0.0, 0, 0

    def _give_up_answers(self) -> None:
        """Voids the plans that wait for a lost server; to be called once all items that have arrived are taken."""
        for plan in list(self._plans):
            if any(plan in server.asked and not server.is_joined for server in self.servers):
                self._void(plan)

    def _void(self, plan: Plan) -> None:
        if plan in self._plans:
            self._plans.remove(plan)
            for server in self.servers:
                if server.holds is plan:
                    server.holds = None

    # Items

    def _take(self) -> Merged | None:
        """Returns the oldest group of batches if it is complete, else the next segments of a server, else None."""
        for _ in self.servers:
            if (merged := self._merged()) is not None:
                return merged
            server = self.servers[self._next]
            self._next = (self._next + 1) % len(self.servers)  # in turn, so that no busy server delays the others
            while server.holds is None and (item := server.client.next()) is not None:
                if item.epoch != server.epoch:
                    self._rejoin(server, item.epoch)
                content = item.content
                server.total_priority, server.size_transitions = content.total_priority, content.size_transitions
                server.allowed_samples = content.allowed_samples
                if isinstance(content, Segments):
                    ring_slots = content.ring_slots + np.int32(server.number * self._offset)
                    part = Contribution(server.number, item, slice(0))
                    return Merged(content._replace(ring_slots=ring_slots), (part,))
                plan = server.asked.popleft()
                if plan in self._plans:
                    plan.answers[server.number] = item
                    server.holds = plan
        return self._merged()

    def _merged(self) -> Merged | None:
        """Returns the oldest group of batches, or None if an answer is missing."""
        if not self._plans or any(self._plans[0] in server.asked for server in self.servers):
            return None
        plan = self._plans.popleft()
        self._in_process += 1
        for number in plan.answers:
            self.servers[number].holds = None
        return merge(plan, self._beta, self._offset * self._frame_slots)


def merge(plan: Plan, beta: float, stride: int) -> Merged:
    """Returns the batches of a plan with all its answers. `stride`: between the indices of two servers."""
    batches, size = len(plan.counts), int(plan.counts[0].sum())
    is_alone = len(plan.answers) == 1
    servers = np.tile(np.arange(plan.counts.shape[1]), batches)
    owner = np.zeros(0) if is_alone else np.repeat(servers, plan.counts.ravel())  # server of each element
    indices, probabilities = np.empty(batches * size, np.int32), np.empty(batches * size)
    parts, contents = [], []
    for number, item in sorted(plan.answers.items()):
        where = slice(None) if is_alone else owner == number
        assert isinstance(item.content, IndexBatches)
        indices[where] = item.content.indices + np.int32(number * stride)
        probabilities[where] = item.content.probabilities * plan.fractions[number]
        parts.append(Contribution(number, item, where))
        contents.append(item.content)
    sizes = np.array([content.size_transitions for content in contents], np.float64)
    drawn = [content.indices.size for content in contents]
    content = Batches(
        indices=indices.reshape(batches, size),
        weights=importance_weights(probabilities.reshape(batches, size), beta),
        samples_per_insert=float(np.average([content.samples_per_insert for content in contents], weights=sizes)),
        age_seconds=float(np.average([content.age_seconds for content in contents], weights=drawn)),
    )
    return Merged(content, tuple(parts))
