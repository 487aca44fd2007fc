"""The links of a run in one process: what actor and learner call on a fleet, without sockets and threads."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np

from apex_jax.agent.algorithm import Params
from apex_jax.agent.exploration import choose_ladder_indices
from apex_jax.config import Config
from apex_jax.links.experience_server import EpisodeMeans
from apex_jax.links.sampling_client import Batches, Received, Segments, batches_of
from apex_jax.links.sampling_server import index_batches
from apex_jax.links.weights_client import Weights
from apex_jax.replay.replay import Replay
from apex_jax.segment_codec import decode_segments, encode_record
from apex_jax.transport.messages import NO_RETURN, ActorStatus, ActorWelcome, EpisodeStatistics
from apex_jax.types import MAX_STREAMED_SEGMENTS, Segment, SegmentSpec


def _ignore(self: object, *arguments: object) -> None:
    """Does nothing, in place of a method that a run in one process does not need."""


class InProcessWeights:
    """In place of `WeightsServer` and `WeightsClient`: holds the newest parameters of the learner."""

    peer_state = "joined"
    is_drained = True

    def __init__(self, first_version: int):
        self.version = first_version
        self.best_return = NO_RETURN  # highest mean return of an evaluation
        self.newest: Weights | None = None
        self.dropped = Counter[str]()
        self.clients = dict[bytes, object]()

    @property
    def updates(self) -> int:
        """Number of updates of the newest parameters; -1 before the first are published."""
        return -1 if self.newest is None else self.newest.updates

    def publish(self, params: Params, updates: int, environment_steps: int, final: bool = False) -> None:
        """Replaces the newest parameters."""
        self.version += 1
        self.newest = Weights(params, self.version, 0, updates, environment_steps, final, time.monotonic())

    def fetch_after(self, last: Weights | None, timeout_seconds: float = 0.0) -> Weights | None:
        """Returns the newest parameters."""
        return self.newest

    close = _ignore


class InProcessReplay:
    """In place of `SamplingClient`: the learner's view of a replay in the same process."""

    peer_state = "joined"
    disconnects = 0

    def __init__(self, replay: Replay, config: Config, spec: SegmentSpec, batches: int):
        """`batches`: how many are drawn at once."""
        self.dropped = Counter[str]()
        self.environment_steps = 0  # set by the learner; the replay counts them itself
        self.is_finish_received = threading.Event()
        self._replay, self._spec = replay, spec
        self._batches, self._batch_size = batches, config.learner.batch_size
        self._beta = config.replay.importance_sampling_exponent
        self._cursor = 0  # insertion id of the newest segment that the learner has

    @property
    def has_next(self) -> bool:
        """Whether `next` returns an item."""
        return self._has_segments or self._replay.can_sample(self._batches * self._batch_size)

    @property
    def _has_segments(self) -> bool:
        return self._cursor < self._replay.buffer.inserted_segments

    def next(self, timeout_seconds: float) -> Received | None:
        """Returns the segments that the learner lacks, else batches if the rate limiter allows them, else None."""
        if self._has_segments:
            return Received(self._new_segments(), epoch=0)
        if not self.has_next:
            return None
        sample = self._replay.sample(self._batches, self._batch_size, time.monotonic())
        return Received(batches_of(index_batches(self._replay, sample), self._batches, self._beta), epoch=0)

    def _new_segments(self) -> Segments:
        run = self._replay.buffer.segments_since(self._cursor, MAX_STREAMED_SEGMENTS)
        self._cursor = run.cursor
        frames, columns, corrupt = decode_segments(run.bodies, self._spec)
        if corrupt:
            self._replay.buffer.discard(run.ring_slots[list(corrupt)], run.generations[list(corrupt)])
        return Segments(run.ring_slots, frames, columns)

    def update_priorities(self, item: Received, priorities: np.ndarray) -> None:
        """Sets the new priorities, float32[K, B], of a draw."""
        assert isinstance(item.content, Batches)
        drawn = item.content.drawn
        self._replay.buffer.update_priorities(drawn.indices, drawn.generations, priorities.ravel())

    def finish(self, reason: str) -> None:
        """Sets `is_finish_received`."""
        self.is_finish_received.set()

    consumed = close = _ignore  # there is no credit


class InProcessExperience:
    """In place of `ExperienceClient`: stores the segments of the actor in the replay."""

    peer_state = "joined"
    disconnects = 0
    error = None

    def __init__(self, replay: Replay, config: Config, spec: SegmentSpec):
        self.finished = threading.Event()  # never set: the process stops
        self.acknowledged_segments = 0
        self.produced = 0  # transitions of the actor so far; updated by the actor before each `put`
        self.dropped = Counter[str]()
        self.episodes = EpisodeMeans(config, spec)
        self._replay, self._config, self._spec = replay, config, spec
        self.peer_id = replay.ledger.highest_actor_number + 1  # of an actor that is new at each start
        self.status = ActorStatus(0.0, 0)

    def join(self) -> ActorWelcome:
        """Returns the number of the actor, and its places, which are spread over the exploration ladder."""
        self._replay.ledger.highest_actor_number = self.peer_id
        self._replay.journal.on_welcome(self.peer_id, self.peer_id)
        size = self._config.actor.environments
        places = choose_ladder_indices(np.zeros(self._config.ladder_size, np.int64), size)
        return ActorWelcome(self.peer_id, places, self._config.ladder_size, size)

    def put(self, segment: Segment, timeout_seconds: float) -> bool:
        """Stores a segment, and returns True."""
        self.acknowledged_segments += 1
        record = encode_record(segment, self._spec, self.peer_id, self.acknowledged_segments, self.produced)
        self._replay.insert(record, segment.columns, time.monotonic())
        return True

    def put_episodes(self, episodes: EpisodeStatistics) -> None:
        """Adds the statistics of finished games to `episodes`."""
        self.episodes.add(episodes)

    close = _ignore
