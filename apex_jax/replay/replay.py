"""The replay as one object: segments and priorities, the ledger of their actors, the rate limiter and the journal.

It has no socket and no clock: the caller, a server or a test, passes the time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from apex_jax.config import Config
from apex_jax.replay.buffer import ReplayBuffer, Sample
from apex_jax.replay.journal import Journal
from apex_jax.replay.ledger import Ledger
from apex_jax.replay.rate_limiter import make_limiter
from apex_jax.types import Columns, SegmentRecord, SegmentSpec


class Replay:
    """Stores and draws segments: updates a `buffer` (ring and sum-tree), `limiter`, `ledger` and `journal` together.

    Callers use a part directly if its change concerns no other part. When `journal.flush` returns, every segment
    inserted before is in the journal.
    """

    def __init__(self, config: Config, spec: SegmentSpec, rng: np.random.Generator, run: str = "") -> None:
        """Creates an empty replay; `restore` continues from its journal.

        `rng`: for the draws; `run`: identity of the training run, empty if not known yet. Raises UsageError if actors
        and learner would wait for each other, JournalError if the journal is in use.
        """
        settings = config.replay
        self.buffer = ReplayBuffer(
            spec,
            settings.capacity_transitions,
            settings.priority_exponent,
            rng,
            from_actors=settings.initial_priority == "actor",
        )
        self.limiter = make_limiter(config, spec)
        self.ledger = Ledger()
        self.journal = Journal(config, spec, self.buffer.capacity_segments, run)

    # Storing

    def can_insert(self, transitions: int) -> bool:
        """Returns whether the rate limiter allows a segment of this many transitions."""
        return self.limiter.can_insert(transitions, self.buffer.size_transitions, self.buffer.is_full)

    def insert(self, segment: SegmentRecord, columns: Columns, now_seconds: float) -> int:
        """Stores a segment and returns its slot in the ring; a full ring evicts its oldest segment."""
        ring_slot = self.buffer.insert(segment.body, columns, now_seconds)
        self.limiter.inserted += segment.transitions
        self.ledger.store(segment.peer_id, segment.sequence, segment.produced, segment.transitions)
        self.journal.on_segment(self.buffer.inserted_segments, segment)
        return ring_slot

    def refuse(self, segment: SegmentRecord, reason: str) -> None:
        """Counts a segment that was rejected; `reason`: see `Ledger.refuse`."""
        self.ledger.refuse(segment.peer_id, segment.sequence, segment.produced, segment.transitions, reason)

    # Sampling

    def can_sample(self, transitions: int) -> bool:
        """Returns whether the rate limiter allows a sample of this many transitions."""
        return transitions <= self.limiter.allowed_samples(self.buffer.size_transitions, self.buffer.is_full)

    def sample(self, batches: int, size: int, now_seconds: float) -> Sample:
        """Draws `batches` of `size` transitions, see `ReplayBuffer.sample`; the limiter counts them."""
        sample = self.buffer.sample(batches, size, now_seconds)
        self.limiter.sampled += sample.indices.size
        return sample

    def take_back(self, sample: Sample) -> None:
        """Uncounts a sample that did not reach the learner."""
        self.limiter.sampled -= sample.indices.size

    # The journal

    def restore(self, now_seconds: float) -> str:
        """Continues from the journal. Returns the identity of its training run, or "". Raises JournalError."""
        self.ledger = self.journal.restore(self.buffer, self.limiter, now_seconds)
        return self.journal.header.run

    def snapshot_if_due(self, now_seconds: float) -> None:
        """Starts a thread that writes a snapshot, if one is due and the previous one is complete."""
        self.journal.snapshot_if_due(self.buffer, self.limiter, self.ledger, now_seconds)

    def finish(self, now_seconds: float) -> None:
        """Writes the last snapshot; returns when it is on disk or the time limit is over."""
        self.journal.finish(self.buffer, self.limiter, self.ledger, now_seconds)

    def metrics(self) -> Mapping[str, float]:
        """Returns values under the tags of `apex_jax.run.metrics.TAGS`."""
        return {
            "replay/size_transitions": self.buffer.size_transitions,
            "replay/bytes": self.buffer.stored_bytes,
            "replay/samples_per_insert": self.limiter.ratio,
            **self.journal.metrics(),
        }
