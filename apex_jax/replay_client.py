"""The replay server alone, from a program of your own: prioritized replay that loses no acknowledged item.

    from apex_jax import ReplayClient

    with ReplayClient("replay.yaml") as replay:
        replay.insert({"tokens": tokens, "reward": reward}, priorities)
        items, weights, handles = replay.sample()
        replay.update_priorities(handles, new_priorities)

docs/replay.md has the settings, the server's command, and its durability. No JAX or EnvPool is imported.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.host.errors import RunError, UsageError
from apex_jax.item_codec import columns_of, item_dtype, item_spec, segment_of
from apex_jax.links.connection import LinkEnd
from apex_jax.links.experience_client import ExperienceClient
from apex_jax.links.sampling_client import Received, SamplingClient, Segments
from apex_jax.process import check_hosts, new_peer_id
from apex_jax.transport.messages import ActorHello, LearnerHello
from apex_jax.transport.security import LinkContext, security_of
from apex_jax.types import SegmentSpec

Handles: TypeAlias = Received
"""The positions of a batch's items in the replay, for any number of calls of `update_priorities`."""

POLL_SECONDS = 0.002  # between two looks at the acknowledgements
WAIT_SECONDS = 0.5  # between two looks for an error of the link


class SampledBatch(NamedTuple):
    """A batch of B items, drawn with replacement: P(i) = p_i^alpha / sum_j p_j^alpha."""

    items: dict[str, np.ndarray]  # by column, [B, ...] each, in arrays of their own
    weights: np.ndarray  # float32[B], importance weights (N P(i))^-beta, divided by the largest of the batch
    handles: Handles


class ReplayClient:
    """Inserts items into a replay server and draws batches of them.

    A program that only inserts or only draws opens only that link, at the first call. Any number of processes may
    insert, and one at a time may draw. Both links reconnect by themselves when the server is away, for at most
    `away_limit_seconds` (0 = for ever), and send unacknowledged items again. A link that failed, because the server
    refuses this client or was away for too long, raises RunError, with a message of one line.

    One thread may insert and another one draw. A process that forks must make its client after the fork.
    """

    def __init__(self, config: str | os.PathLike[str], *settings: str, prefetch: int = 0) -> None:
        """Reads the settings, which must be those of the server, and connects to nothing yet.

        `config`: path of the server's YAML file; `settings`: KEY=VALUE texts that override it, as on the command
        line; `prefetch`: batches that the server draws ahead of `sample`, which saves the round trip, but such a
        batch is drawn before the newest priorities are written. Raises UsageError for wrong settings.
        """
        self._config = load(os.fspath(config), settings)
        if not self._config.replay.columns:
            raise UsageError("replay.columns is empty: set the columns of your items, such as reward:float32")
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: must be at least 0")
        self.dtype = item_dtype(self._config.replay.columns)  # of an item, a structured dtype
        self._spec = item_spec(self._config)
        self._prefetch = prefetch
        self._writer: _Writer | None = None
        self._reader: _Reader | None = None

    def __enter__(self) -> ReplayClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes the client; flushes it before that, without a limit of time, unless an exception was raised."""
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def insert(self, items: Mapping[str, ArrayLike], priorities: ArrayLike | None = None) -> None:
        """Inserts N items, which are copied.

        `items`: [N, ...] of each column, of exactly its dtype; `priorities`: float[N], finite and above 0, None = 1.
        Items are sent in segments of `actor.segment_slots` - 1: items that fill none wait for the next call, or for
        `flush`. Blocks while more than twice `actor.max_outstanding_segments` are not acknowledged: the server is away,
        or its rate limiter waits for draws. Raises ValueError, before anything is inserted, if an array does not fit,
        and RunError once the link has failed.
        """
        rows, priority = self._rows(items, priorities)
        if self._writer is None:
            self._writer = _Writer(self._config, self._spec, self.dtype)
        self._writer.insert(rows, priority)

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Sends the segment that is not full yet, and returns once the server has acknowledged every item inserted.

        A segment sent before it is full takes the room of a full one in the replay. Raises TimeoutError after the
        timeout (None = never), while unacknowledged items stay on their way, and RunError.
        """
        if self._writer is not None:
            self._writer.flush(timeout_seconds)

    def sample(self, timeout_seconds: float | None = None) -> SampledBatch:
        """Returns a batch of `learner.batch_size` items.

        Blocks until `replay.min_size_to_sample` items are stored and the rate limiter allows the draw; the first call
        of a client also waits for all items in the replay, which are sent to it once. Raises RunError once the link has
        failed, and TimeoutError after the timeout (None = never); the next call then returns the batch of this one.
        """
        if self._reader is None:
            self._reader = _Reader(self._config, self._spec, self.dtype, self._prefetch)
        return self._reader.sample(timeout_seconds)

    def update_priorities(self, handles: Handles, priorities: ArrayLike) -> None:
        """Sends the new priorities, float[B], finite and above 0, of the items of a batch; does not wait.

        Draws asked for later use them. Those of items that have left the replay are ignored, as are those of a batch
        that was drawn before the link was lost. Raises ValueError if they do not fit the batch.
        """
        if self._reader is None:
            raise ValueError("handles are not of this client: it has drawn nothing")
        self._reader.update_priorities(handles, priorities)

    def close(self) -> None:
        """Ends both links without a wait; items that were not flushed may be lost."""
        for end in (self._writer, self._reader):
            if end is not None:
                end.close()
        self._writer = self._reader = None

    def _rows(self, items: Mapping[str, ArrayLike], priorities: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns items [N] of the dtype of this client and their priorities, float32[N]; raises ValueError."""
        names = self.dtype.names or ()
        if set(items) != set(names):
            raise ValueError(f"items have the columns {sorted(items)}, must have {sorted(names)}")
        arrays = {name: np.asarray(items[name]) for name in names}
        count = len(np.atleast_1d(arrays[names[0]]))
        rows = np.empty(count, self.dtype)
        for name, array in arrays.items():
            expected, shape = self.dtype[name].base, (count, *self.dtype[name].shape)
            if array.shape != shape or array.dtype != expected:
                raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, must be {expected}{list(shape)}")
            rows[name] = array
        return rows, _checked_priorities(np.ones(count) if priorities is None else priorities, count)


class _Writer:
    """The experience link, which treats this process as an actor with one environment."""

    def __init__(self, config: Config, spec: SegmentSpec, dtype: np.dtype) -> None:
        check_hosts("actor", config)
        self._context = LinkContext.of(security_of(config, "actor"))
        self._address = config.addresses.experience
        self._spec = spec
        end = LinkEnd(self._context, self._address, away_limit_seconds=config.away_limit_seconds)
        hello = ActorHello(new_peer_id(), config.compatibility_key, num_environments=1)
        self._client = ExperienceClient(end, spec, hello, config.actor.max_outstanding_segments)
        self._rows = np.empty(spec.max_transitions, dtype)
        self._priorities = np.empty(spec.max_transitions, np.float32)
        self._count = 0  # items that wait for a full segment
        self._queued = 0  # items given to the client

    def insert(self, rows: np.ndarray, priorities: np.ndarray) -> None:
        start = 0
        while start < len(rows):
            end = start + len(self._rows) - self._count
            count = self._count + len(rows[start:end])
            self._rows[self._count : count] = rows[start:end]
            self._priorities[self._count : count] = priorities[start:end]
            self._count, start = count, end
            if count == len(self._rows):
                self._queue(math.inf)

    def flush(self, timeout_seconds: float | None) -> None:
        until = _deadline(timeout_seconds)
        if not self._count or self._queue(until):
            while self._client.acknowledged < self._queued and time.monotonic() < until:
                self._check()
                time.sleep(POLL_SECONDS)
        if missing := self._queued + self._count - self._client.acknowledged:
            what = f"{missing} items are not acknowledged after {timeout_seconds:g} s"
            raise TimeoutError(f"{what}: {_link(self._address, self._client.peer_state)}")

    def close(self) -> None:
        self._client.close()
        self._context.term()

    def _queue(self, until_seconds: float) -> bool:
        """Queues the waiting items as one segment; returns False if the queue is still full at `until_seconds`."""
        segment = segment_of(self._rows[: self._count], self._priorities[: self._count], self._spec)
        self._client.produced = self._queued + self._count
        while not self._client.put(segment, min(WAIT_SECONDS, max(0.0, until_seconds - time.monotonic()))):
            self._check()
            if time.monotonic() >= until_seconds:
                return False
        self._queued, self._count = self._queued + self._count, 0
        return True

    def _check(self) -> None:
        if self._client.finished.is_set():
            raise self._client.error or RunError(f"the replay server at {self._address} has ended the run")


class _Reader:
    """The sampling link, and a copy of the replay's items, of which the server sends each one once."""

    def __init__(self, config: Config, spec: SegmentSpec, dtype: np.dtype, prefetch: int) -> None:
        check_hosts("learner", config)
        self._context = LinkContext.of(security_of(config, "learner"))
        self._config = config
        self._dtype = dtype
        capacity_segments = spec.ring_segments(config.replay.capacity_transitions)
        self._ring = np.zeros((capacity_segments, spec.slots, *spec.frame_shape), np.uint8)  # takes memory when written
        self._last: Received | None = None  # the newest batch, whose credit is returned at the next draw
        end = LinkEnd(self._context, config.addresses.sampling, away_limit_seconds=config.away_limit_seconds)
        self._client = SamplingClient(
            end,
            spec,
            LearnerHello(new_peer_id(), config.compatibility_key, 0, 1, config.learner.batch_size),
            capacity_segments,
            1 + prefetch,
            config.replay.importance_sampling_exponent,
        )

    def sample(self, timeout_seconds: float | None) -> SampledBatch:
        until = _deadline(timeout_seconds)
        if self._last is not None:
            self._client.consumed(self._last)
            self._last = None
        while True:
            item = self._client.next(min(WAIT_SECONDS, until - time.monotonic()))
            if item is None:
                if time.monotonic() >= until:
                    raise TimeoutError(f"no batch after {timeout_seconds:g} s: {self._why_no_batch()}")
            elif isinstance(item.content, Segments):
                self._ring[item.content.ring_slots] = item.content.frames
                self._client.consumed(item)
            else:
                self._last = item
                frames = self._ring.reshape(-1, self._dtype.itemsize)[item.content.indices[0]]
                return SampledBatch(columns_of(frames, self._dtype), item.content.weights[0].copy(), item)

    def update_priorities(self, handles: Handles, priorities: ArrayLike) -> None:
        self._client.update_priorities(handles, _checked_priorities(priorities, self._config.learner.batch_size))

    def close(self) -> None:
        self._client.close()
        self._context.term()

    def _why_no_batch(self) -> str:
        if self._client.peer_state != "joined":
            return _link(self._config.addresses.sampling, self._client.peer_state)
        replay = self._config.replay
        few = f"fewer than replay.min_size_to_sample={replay.min_size_to_sample} items are stored"
        ratio = f", or replay.samples_per_insert={replay.samples_per_insert:g} asks for more inserts"
        return few + ratio * bool(replay.samples_per_insert)


def _deadline(timeout_seconds: float | None) -> float:
    return math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds


def _link(address: str, peer_state: str) -> str:
    """Returns the state of the link as a part of an error message; `peer_state`: see `Connection`."""
    fix = "" if peer_state == "joined" else "; start it, or correct the address"
    return f"the link to the replay server at {address} is {peer_state}{fix}"


def _checked_priorities(priorities: ArrayLike, count: int) -> np.ndarray:
    """Returns priorities as float32[count]; raises ValueError unless all are finite and above 0."""
    given = np.asarray(priorities)
    if given.shape != (count,) or given.dtype.kind not in "fiu":
        raise ValueError(f"priorities are {given.dtype}{list(given.shape)}, must be numbers [{count}]")
    with np.errstate(over="ignore", under="ignore"):
        checked = given.astype(np.float32)
    if not (checked > 0).all() or not np.isfinite(checked).all():  # the first is False for NaN
        raise ValueError(f"priorities are {given.min()} to {given.max()}, must be finite and above 0 as float32")
    return checked
