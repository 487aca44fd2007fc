"""An actor's outgoing segments: encoded, numbered, and kept until the replay server has stored them. No socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from apex_jax.segment_codec import encode_record
from apex_jax.transport.messages import EpisodeStatistics
from apex_jax.types import Segment, SegmentRecord, SegmentSpec

MAX_EPISODES = 1024  # queued messages; the oldest are dropped


class Outbox:
    """The unacknowledged segments in order of their sequence numbers; the sent ones come first."""

    def __init__(self, peer_id: int, spec: SegmentSpec) -> None:
        self.episodes: deque[EpisodeStatistics] = deque(maxlen=MAX_EPISODES)  # sent once, not ordered with segments
        self._peer_id = peer_id
        self._spec = spec
        self._unacknowledged: deque[SegmentRecord] = deque()
        self._num_sent = 0  # segments sent on this connection, counted from the oldest
        self._sequence = 0  # sequence number of the newest segment
        self._highest_sent = 0  # highest sequence number sent on any connection

    def __len__(self) -> int:
        return len(self._unacknowledged)

    @property
    def acknowledged_sequence(self) -> int:
        """Every segment up to this sequence number is acknowledged and deleted."""
        return self._unacknowledged[0].sequence - 1 if self._unacknowledged else self._sequence

    def add(self, segment: Segment, produced: int) -> None:
        """Encodes a segment and assigns the next sequence number. Raises CorruptSegment.

        `produced`: transitions that the actor has produced so far.
        """
        record = encode_record(segment, self._spec, self._peer_id, self._sequence + 1, produced)
        self._sequence = record.sequence
        self._unacknowledged.append(record)

    def flush(self, credit: int, send: Callable[[SegmentRecord], bool]) -> None:
        """Sends what was not sent on this connection, oldest first, until `send` fails or `credit` are in flight."""
        while self._num_sent < min(len(self), credit) and send(self._unacknowledged[self._num_sent]):
            self._highest_sent = max(self._highest_sent, self._unacknowledged[self._num_sent].sequence)
            self._num_sent += 1

    def on_new_connection(self) -> None:
        """Marks every segment as unsent."""
        self._num_sent = 0

    def acknowledge(self, sequence: int) -> int | None:
        """Deletes the segments up to this number; returns their transitions, or None if it was never sent."""
        if sequence > self._highest_sent:
            return None
        transitions = 0
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            transitions += self._unacknowledged.popleft().transitions
            self._num_sent = max(0, self._num_sent - 1)
        return transitions
