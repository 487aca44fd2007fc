"""The replay server's side of the sampling link: one ordered stream of segments and index batches."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import zmq

from apex_jax.config import Config
from apex_jax.links.server import LinkServer
from apex_jax.process import digest_of_peer_id
from apex_jax.replay.buffer import Sample
from apex_jax.replay.replay import Replay
from apex_jax.run.identity import RunIdentity
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    CorruptSegments,
    Credit,
    Finish,
    Goodbye,
    IndexBatches,
    LearnerHello,
    LearnerWelcome,
    PriorityUpdate,
    Refusal,
    StreamedSegments,
)
from apex_jax.types import MAX_ENVIRONMENT_STEPS, MAX_SAMPLES_PER_INSERT, MAX_STREAMED_SEGMENTS, PEER_TIMEOUT_SECONDS

_log = logging.getLogger(__name__)

SEGMENTS_AT_ONCE = MAX_STREAMED_SEGMENTS  # maximum in one message
BYTES_AT_ONCE = 4 * 2**20  # on a slow line, a message must arrive within the learner's timeout
LARGEST_CREDIT = 2**13  # above the credit of any real learner; bounds the work for a faulty one


@dataclass
class LearnerPeer:
    """The server's record of the connected learner."""

    connection_id: bytes
    peer_id: int
    seen_seconds: float
    batches_at_once: int
    batch_size: int
    cursor: int = 0  # insertion id of the newest segment sent to it
    draws_credit: int = 0
    segments_credit: int = 0

    @property
    def transitions(self) -> int:
        """Transitions of a draw."""
        return self.batches_at_once * self.batch_size


class SamplingServer(LinkServer[LearnerPeer]):
    """Streams to one learner: every segment once, before the first batch drawn after its insertion.

    When the learner consumes a batch, its frame store therefore equals the replay buffer from which the batch was
    drawn. The server queues nothing: it tracks the learner's credit, and its cursor in the sequence of segments.
    """

    def __init__(self, socket: zmq.Socket, config: Config, replay: Replay, run: RunIdentity | None = None):
        """`run`: the run that its learner must be part of, None = any."""
        self._learners: dict[bytes, LearnerPeer] = {}  # one at most
        names, key = ("the replay server", "this learner"), config.compatibility_key
        super().__init__(names, socket, key, run, self._learners, max_peers=1)
        self.finished: str | None = None  # reason for the end of the run, once the learner has sent it
        self.run_steps = 0  # environment steps of the whole run, as counted by the learner
        self._config = config
        self._replay = replay
        self._handlers = {
            LearnerHello: self._on_hello,
            Credit: self._on_credit,
            PriorityUpdate: self._on_priorities,
            CorruptSegments: self._on_corrupt_segments,
            Finish: self._on_finish,
            Goodbye: self._on_goodbye,
        }

    @property
    def learner(self) -> LearnerPeer | None:
        """The connected learner."""
        learners = list(self._learners.values())  # a copy, since this is read from any thread
        return learners[0] if learners else None

    def stream(self, now_seconds: float) -> None:
        """Sends the segments that the learner lacks, then batches, while its credit and the rate limiter allow."""
        learner = self.learner
        if learner is None or not self._send_segments(learner):
            return
        while learner.draws_credit and self._replay.can_sample(learner.transitions):
            sample = self._replay.sample(learner.batches_at_once, learner.batch_size, now_seconds)
            if not sockets.send(self._socket, index_batches(self._replay, sample), learner.connection_id):
                self._replay.take_back(sample)
                return
            learner.draws_credit -= 1

    @property
    def is_in_arrears(self) -> bool:
        """Returns whether batches could be drawn, but the learner must receive segments first.

        No new segments are stored meanwhile: actors that are faster than the learner's link would starve the learner.
        """
        learner = self.learner
        if learner is None or learner.cursor == self._replay.buffer.inserted_segments:
            return False
        return learner.draws_credit > 0 and self._replay.can_sample(learner.transitions)

    def _send_segments(self, learner: LearnerPeer) -> bool:
        """Sends the segments the learner lacks. Returns True once all are sent, so that batches may follow."""
        while learner.cursor < self._replay.buffer.inserted_segments:
            run = self._replay.buffer.segments_since(learner.cursor, min(SEGMENTS_AT_ONCE, learner.segments_credit))
            if not run.bodies:
                return False
            body_bytes = np.array([len(body) for body in run.bodies], np.int32)
            count = max(1, int(np.searchsorted(np.cumsum(body_bytes), BYTES_AT_ONCE, side="right")))
            message = StreamedSegments(
                ring_slots=run.ring_slots[:count],
                generations=run.generations[:count],
                body_bytes=body_bytes[:count],
                bodies=b"".join(run.bodies[:count]),
            )
            if not sockets.send(self._socket, message, learner.connection_id):
                return False
            learner.cursor = run.cursor - len(run.bodies) + count
            learner.segments_credit -= count
        return True

    def _on_hello(self, connection_id: bytes, message: LearnerHello, now_seconds: float) -> None:
        if self.learner is not None and self.learner.connection_id == connection_id:
            return  # a repeated hello; the welcome is in flight, and a second one would double the credit
        if not self.run_identity.name and message.run_identity:
            self.run_identity.adopt(message.run_identity, "the learner")
            self._replay.journal.on_run(self.run_identity.name)
        welcome = LearnerWelcome(
            capacity_segments=self._replay.buffer.capacity_segments, run_identity=self.run_identity.name
        )
        if not sockets.send(self._socket, welcome, connection_id):
            return
        learner = LearnerPeer(connection_id, message.peer_id, now_seconds, message.batches_at_once, message.batch_size)
        self._learners.clear()  # an earlier connection of this learner
        self._learners[connection_id] = learner
        self.run_steps = message.environment_steps
        live = self._replay.buffer.size_segments
        _log.info("learner %s joins; %d segments are live", digest_of_peer_id(message.peer_id), live)

    def _refusal(self, connection_id: bytes, hello: LearnerHello) -> Refusal | None:
        with_run = hello._replace(run_identity="") if hello.is_new_run else hello  # a proposal is no other run
        if (refusal := super()._refusal(connection_id, with_run)) is not None:
            return refusal
        if hello.batches_at_once * hello.batch_size > (largest := self._config.learner.largest_sample):
            asked = f"{hello.batches_at_once} batches of {hello.batch_size}"
            reason = f"{asked} at once exceed the {largest} transitions in the replay server's config; use the same one"
            return Refusal(reason=reason, final=True)
        if self.learner is not None and self.learner.peer_id != hello.peer_id:
            fix = "stop it, or give this one a replay server of its own (addresses.sampling)"
            killed = f"one did that was killed in the last {PEER_TIMEOUT_SECONDS:.0f} s"
            return Refusal(reason=f"another learner draws from this replay server, or {killed}; {fix}", final=False)
        return None

    def _on_credit(self, connection_id: bytes, message: Credit, now_seconds: float) -> None:
        assert self.learner is not None
        self.run_steps = max(self.run_steps, message.environment_steps)
        if not message.draws and not message.segments:
            sockets.send(self._socket, message, connection_id)  # serves as the heartbeat to the learner
        self.learner.draws_credit = min(self.learner.draws_credit + message.draws, LARGEST_CREDIT)
        self.learner.segments_credit = min(self.learner.segments_credit + message.segments, LARGEST_CREDIT)

    def _on_priorities(self, connection_id: bytes, message: PriorityUpdate, now_seconds: float) -> None:
        result = self._replay.buffer.update_priorities(message.indices, message.generations, message.priorities)
        self.dropped["stale_priority"] += result.stale
        self.dropped["invalid_priority"] += result.invalid

    def _on_corrupt_segments(self, connection_id: bytes, message: CorruptSegments, now_seconds: float) -> None:
        discarded = self._replay.buffer.discard(message.ring_slots, message.generations)
        if discarded and not self.dropped["corrupt_segment"]:
            _log.warning("the learner cannot decode some segments: they are no longer drawn (logged once, counted)")
        self.dropped["corrupt_segment"] += discarded

    def _on_finish(self, connection_id: bytes, message: Finish, now_seconds: float) -> None:
        self.finished = message.reason
        sockets.send(self._socket, message, connection_id)  # the learner repeats its Finish until this answer

    def _evict(self, connection_id: bytes) -> None:
        _log.warning("the learner has been silent for %.0f s: another may take its place", PEER_TIMEOUT_SECONDS)
        del self._learners[connection_id]

    def _on_goodbye(self, connection_id: bytes, message: Goodbye, now_seconds: float) -> None:
        del self._learners[connection_id]
        # The learner has saved a checkpoint; a snapshot now lets both resume from the same moment.
        self._replay.journal.request_snapshot()
        _log.info("the learner leaves")


def index_batches(replay: Replay, sample: Sample) -> IndexBatches:
    """Returns a sample as the learner receives it, with the state of the replay after it."""
    return IndexBatches(
        indices=sample.indices,
        generations=sample.generations,
        probabilities=sample.probabilities,
        replay_id=replay.journal.header.replay_id,
        environment_steps=min(replay.ledger.steps, MAX_ENVIRONMENT_STEPS),
        samples_per_insert=min(replay.limiter.ratio, MAX_SAMPLES_PER_INSERT),
        age_seconds=sample.age_seconds,
    )
