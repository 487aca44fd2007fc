"""The replay server's journal: what it stores is written down as it happens, and read back when it starts again.

Segments, refusals and welcomes go to the log before they are acknowledged; priorities, counters and random numbers go
into a snapshot, which a thread writes. After a kill the newest snapshot and the log behind it make up everything but
the priorities that the learner has sent since: those segments have what the snapshot knew, or what they came with.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from apex_jax.config import Config
from apex_jax.journal.heads import Damaged, Identity
from apex_jax.journal.segment_log import SEGMENT, Record, SegmentLog, sync
from apex_jax.journal.snapshots import Snapshot, Snapshots
from apex_jax.links.ledger import COLUMNS, REFUSALS, REMEMBERED_RUNS, TOTALS, Ledger
from apex_jax.replay.buffer import BufferState, ReplayBuffer, StoredSegments
from apex_jax.replay.rate_limiter import RateLimiter
from apex_jax.transport.codec import CorruptSegment, decode_columns
from apex_jax.types import MAX_COUNT, ActorStatus, SegmentMessage, SegmentSpec

_log = logging.getLogger(__name__)

WELCOME, DEPARTURE, LEARNER, FIRST_REFUSAL = 1, 2, 3, 4  # kinds of records; each reason of a refusal is one more
LOG_BYTES_AT_MOST = 2**28  # behind the newest snapshot: then another is due, so that old files can go
RETRY_SECONDS = 5.0  # after a snapshot that failed, or snapshot_interval_seconds where that is less; doubled each time
CLOSE_SECONDS = 20.0  # that the last snapshot may take: a spot machine has two minutes in all
COUNTS = struct.Struct("<5q")  # of an `ActorStatus`, in a departure
MAX_POWER = 1e295  # the largest priority there is, raised to the largest exponent, is below


class Counters(NamedTuple):
    """What the services count that outlives a server."""

    ledger: Ledger
    environment_steps: int
    earlier_environment_steps: int | None
    welcomed: int


class Saved(NamedTuple):
    """A snapshot whose values have been looked at."""

    event: int  # the last one that it knows of
    buffer: BufferState
    limiter: dict[str, Any]
    counters: Counters


class ReplayJournal:
    """The journal of one replay server, which has the directory to itself until `close`."""

    def __init__(self, config: Config, spec: SegmentSpec, capacity_segments: int) -> None:
        """Opens or begins the journal of the run. JournalError."""
        self.directory = Path(config.directory, "replay")
        identity = Identity(config.agreement, spec)
        self._config = config
        self._spec = spec
        self._log = SegmentLog(self.directory, identity, capacity_segments)
        self._snapshots = Snapshots(self.directory, identity)
        self._thread: threading.Thread | None = None
        self._failed: list[Path] | None = None  # by the thread: what it could not sync, to be tried again
        self._snapshot_errors = 0
        self._failures_in_a_row = 0
        self._next_seconds = 0.0  # the next snapshot is due then, ...
        self._next_bytes = 0  # ... or when the log has so many bytes

    @property
    def errors(self) -> int:
        """Times the disk could not be written to, since this server started."""
        return self._log.errors + self._snapshot_errors

    @property
    def num_bytes(self) -> int:
        """Bytes of the log on the disk."""
        return self._log.num_bytes

    # What happens

    def on_segment(self, number: int, run_id: int, message: SegmentMessage, transitions: int) -> None:
        """Takes a segment that was stored as insertion `number`."""
        steps, body, crc = message.environment_steps, message.body, message.crc
        self._log.append(SEGMENT, number, run_id, message.sequence, steps, transitions, body, crc)

    def on_refusal(self, number: int, run_id: int, message: SegmentMessage, transitions: int, reason: str) -> None:
        """Takes a segment that was not stored, after insertion `number`."""
        kind = FIRST_REFUSAL + REFUSALS.index(reason)
        self._log.append(kind, number, run_id, message.sequence, message.environment_steps, transitions)

    def on_welcome(self, run_id: int, incarnation: int) -> None:
        """Takes an actor that was given an incarnation."""
        self._log.append(WELCOME, 0, run_id, incarnation)

    def on_departure(self, status: ActorStatus) -> None:
        """Takes the last that was heard of an actor; of one that is there, more will be."""
        body = COUNTS.pack(*status[-5:])
        self._log.append(DEPARTURE, 0, status.run_id, 0, body=body, crc=zlib.crc32(body))

    def on_learner(self, earlier_environment_steps: int) -> None:
        """Takes what a learner said of the steps before this run of the replay."""
        self._log.append(LEARNER, 0, 0, earlier_environment_steps)

    def flush(self, now_seconds: float) -> None:
        """Writes what was taken; returns also where the disk fails, which is counted, said once and tried again."""
        self._log.flush(now_seconds)

    # Snapshots

    def snapshot_if_due(
        self, buffer: ReplayBuffer, limiter: RateLimiter, counters: Callable[[], Counters], now_seconds: float
    ) -> None:
        """Has a snapshot written where one is due, and the one before is."""
        if self._thread is not None and not self._thread.is_alive():
            self._take_result(now_seconds)
        is_due = now_seconds >= self._next_seconds or self._log.num_bytes >= self._next_bytes
        if self._thread is None and is_due:
            self.snapshot(buffer, limiter, counters(), now_seconds)

    def snapshot(self, buffer: ReplayBuffer, limiter: RateLimiter, counters: Counters, now_seconds: float) -> None:
        """Copies what is to be saved, and has a thread write it; `finish` waits for that."""
        self._log.flush(now_seconds)
        facts, arrays = _pack(self._log.last_event, buffer.state(now_seconds), limiter, self._config, counters)
        unsynced, left = self._log.take_unsynced(), self._log.take_left(buffer.oldest_number)
        self._next_seconds = now_seconds + self._config.replay.snapshot_interval_seconds
        self._next_bytes = self._log.num_bytes + LOG_BYTES_AT_MOST
        arguments = (facts, arrays, unsynced, left)
        self._thread = threading.Thread(target=self._write, args=arguments, name="replay snapshot", daemon=True)
        self._thread.start()

    def finish(self, buffer: ReplayBuffer, limiter: RateLimiter, counters: Counters, now_seconds: float) -> None:
        """Writes the last snapshot; returns once it is on the disk, or that took too long."""
        self.flush(np.inf)
        for is_last in (False, True):
            if is_last:
                self.snapshot(buffer, limiter, counters, now_seconds)
            if self._thread is not None:
                self._thread.join(CLOSE_SECONDS)
                if self._thread.is_alive():
                    _log.warning("the last snapshot is not written within %.0f s: left out", CLOSE_SECONDS)
                    return
                self._take_result(now_seconds)

    def close(self) -> None:
        """Writes what was taken, and gives the directory free."""
        self.flush(np.inf)
        self._log.close()

    def _write(
        self, facts: dict[str, Any], arrays: dict[str, np.ndarray], unsynced: list[Path], left: list[Path]
    ) -> None:
        """Runs on the thread: the log is on the disk before the snapshot that relies on it."""
        try:
            sync(unsynced)
            self._snapshots.write(facts, arrays)
        except OSError as error:
            self._failed = unsynced
            self._snapshot_errors += 1
            if not self._failures_in_a_row:
                message = "no snapshot is written to %s (told once, tried again): %s"
                _log.warning(message, self.directory, error)
        for path in left:  # also where it failed: a full disk needs the room
            with contextlib.suppress(OSError):
                path.unlink()

    def _take_result(self, now_seconds: float) -> None:
        failed, self._failed, self._thread = self._failed, None, None
        if failed is None:
            if self._failures_in_a_row:
                _log.info("snapshots are written to %s again", self.directory)
            self._failures_in_a_row = 0
            return
        self._log.not_synced(failed)
        delay = RETRY_SECONDS * 2 ** min(self._failures_in_a_row, 10)
        self._failures_in_a_row += 1
        self._next_seconds = now_seconds + min(delay, self._config.replay.snapshot_interval_seconds)

    # Starting again

    def restore(self, buffer: ReplayBuffer, limiter: RateLimiter, now_seconds: float) -> Counters:
        """Fills the empty buffer and the limiter with what was written down; returns the counters.

        JournalError where the journal is of another configuration; what is damaged is left out and said.
        """
        started = time.monotonic()
        saved = self._snapshots.read_newest(self._parse)
        counters = saved.counters if saved is not None else Counters(Ledger(), 0, None, 0)
        snapshot_event = saved.event if saved is not None else 0
        bodies: deque[tuple[int, bytes]] = deque(maxlen=buffer.capacity_segments)
        inserted_since = 0
        for record in self._log.read():
            if record.event > snapshot_event:
                inserted_since += record.transitions if record.kind == SEGMENT else 0
                counters = _after(counters, record)
            if record.kind == SEGMENT and record.body is not None:
                bodies.append((record.number, record.body))
        self._log.last_event = max(self._log.last_event, snapshot_event)
        segments = self._segments(bodies)
        known = buffer.restore(segments, saved.buffer if saved is not None else None, now_seconds)
        self._log.keep_unreadable(buffer.inserted_segments + 1)
        self._restore_limiter(limiter, saved, inserted_since)
        self._next_seconds = now_seconds + self._config.replay.snapshot_interval_seconds
        self._next_bytes = self._log.num_bytes + LOG_BYTES_AT_MOST
        self._say(buffer, saved, known, time.monotonic() - started)
        return counters

    def _segments(self, bodies: deque[tuple[int, bytes]]) -> StoredSegments:
        """Returns the segments whose columns are sound."""
        numbers: list[int] = []
        kept: list[bytes] = []
        priorities = np.zeros((len(bodies), self._spec.slots), np.float32)
        for number, body in bodies:
            if numbers and number <= numbers[-1]:
                self._log.left_out["repeated records"] += 1
                continue
            try:
                priorities[len(kept)] = decode_columns(body, self._spec).priority
            except CorruptSegment:
                self._log.left_out["damaged records"] += 1
                continue
            numbers.append(number)
            kept.append(body)
        return StoredSegments(np.array(numbers, np.int64), kept, priorities[: len(kept)])

    def _restore_limiter(self, limiter: RateLimiter, saved: Saved | None, inserted_since: int) -> None:
        if saved is None:
            limiter.restore(0, 0, inserted_since)
        elif saved.limiter["ratio"] == _ratio(self._config):
            limiter.restore(saved.limiter["inserted"], saved.limiter["sampled"], inserted_since)
        else:  # the surplus that another ratio would make of these counters might take hours to work off
            _log.info("replay.samples_per_insert or min_size_to_sample is another one: counted anew from here")
            limiter.restore(0, 0, saved.limiter["inserted"] + inserted_since)

    def _say(self, buffer: ReplayBuffer, saved: Saved | None, known: int, seconds: float) -> None:
        if left_out := ", ".join(f"{number} {what}" for what, number in self._log.left_out.items()):
            _log.warning("left out of %s: %s", self.directory, left_out)
        if not buffer.size_segments and saved is None:
            return
        _log.info(
            "restored %d segments (%d transitions) from %s in %.1f s",
            buffer.size_segments,
            buffer.size_transitions,
            self.directory,
            seconds,
        )
        exponent = self._config.replay.priority_exponent
        if saved is not None and saved.buffer.priority_exponent != exponent:
            before = saved.buffer.priority_exponent
            _log.info("priority_exponent was %g, is %g: all have their first priorities again", before, exponent)
        elif known < buffer.size_segments:
            _log.info(
                "%d segments have their first priorities: no snapshot knows of them", buffer.size_segments - known
            )

    def _parse(self, snapshot: Snapshot) -> Saved:
        """Looks at every value of a snapshot; raises Damaged."""
        try:
            return _unpack(snapshot.facts, snapshot.arrays, self._spec.slots)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Damaged(f"its values cannot be used: {error}") from None


def _after(counters: Counters, record: Record) -> Counters:
    """Returns the counters after something happened."""
    reason = record.kind - FIRST_REFUSAL
    if record.kind == WELCOME:
        return counters._replace(welcomed=max(counters.welcomed, record.sequence))
    if record.kind == DEPARTURE:
        if record.body is not None and len(record.body) == COUNTS.size:
            counts = (min(max(0, count), MAX_COUNT) for count in COUNTS.unpack(record.body))
            counters.ledger.report(ActorStatus(record.run_id, 0.0, 0, *counts))
        return counters
    if record.kind == LEARNER:
        return counters._replace(earlier_environment_steps=record.sequence)
    if record.kind == SEGMENT:
        counters.ledger.store(record.run_id, record.sequence, record.transitions)
    elif reason < len(REFUSALS):
        counters.ledger.refuse(record.run_id, record.sequence, record.transitions, REFUSALS[reason])
    return counters._replace(environment_steps=counters.environment_steps + record.environment_steps)


def _ratio(config: Config) -> list[float]:
    """Returns what counters of the rate limiter are good for."""
    return [config.replay.samples_per_insert, float(config.replay.min_size_to_sample)]


def _pack(
    event: int, state: BufferState, limiter: RateLimiter, config: Config, counters: Counters
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns a snapshot's facts and arrays; what `_unpack` gets."""
    facts = {
        "event": event,
        "inserted_segments": state.inserted_segments,
        "priority_exponent": float(state.priority_exponent),
        "max_priority": state.max_priority,
        "random_state": state.random_state,
        "limiter": {"inserted": limiter.inserted, "sampled": limiter.sampled, "ratio": _ratio(config)},
        "environment_steps": counters.environment_steps,
        "earlier_environment_steps": counters.earlier_environment_steps,
        "welcomed": counters.welcomed,
        "refused": dict(counters.ledger.refused),
        "forgotten": dict(counters.ledger.forgotten),
    }
    arrays = {
        "numbers": state.numbers,
        "leaves": state.leaves,
        "ages_seconds": state.ages_seconds,
        "accounts": counters.ledger.to_array(),
    }
    return facts, arrays


def _unpack(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], slots: int) -> Saved:
    numbers, leaves, ages, accounts = (arrays[name] for name in ("numbers", "leaves", "ages_seconds", "accounts"))
    used = len(numbers)
    _check(numbers.dtype == accounts.dtype == np.int64 and leaves.dtype == ages.dtype == np.float64, "dtypes")
    _check(numbers.shape == ages.shape == (used,) and leaves.shape == (used, slots), "shapes")
    _check(bool((leaves >= 0).all() and (leaves <= MAX_POWER).all()), "leaves")
    _check(bool(np.isfinite(ages).all()), "ages_seconds")
    _check(accounts.shape[1:] == (COLUMNS,) and len(accounts) <= REMEMBERED_RUNS, "accounts")
    _check(bool((accounts >= 0).all() and (accounts[:, 2:] <= 2**60).all()), "accounts")
    limiter, earlier = facts["limiter"], facts["earlier_environment_steps"]
    ratio = limiter["ratio"]
    _check(type(ratio) is list and all(type(number) is float for number in ratio), "ratio")
    for counts, names in ((facts["refused"], REFUSALS), (facts["forgotten"], TOTALS)):
        _check(all(name in names and type(n) is int and n >= 0 for name, n in counts.items()), "ledger")
    state = BufferState(
        inserted_segments=_count(facts["inserted_segments"]),
        priority_exponent=_real(facts["priority_exponent"]),
        max_priority=_real(facts["max_priority"]),
        random_state=_random_state(facts["random_state"]),
        numbers=numbers,
        leaves=leaves,
        ages_seconds=ages,
    )
    _check(bool((numbers >= 0).all() and (numbers <= state.inserted_segments).all()), "numbers")
    counters = Counters(
        ledger=Ledger.from_array(accounts, Counter(facts["refused"]), Counter(facts["forgotten"])),
        environment_steps=_count(facts["environment_steps"]),
        earlier_environment_steps=None if earlier is None else _count(earlier),
        welcomed=_count(facts["welcomed"]),
    )
    saved_limiter = {name: _count(limiter[name]) for name in ("inserted", "sampled")} | {"ratio": ratio}
    return Saved(_count(facts["event"]), state, saved_limiter, counters)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise Damaged(f"{what} cannot be what was written")


def _count(value: Any) -> int:
    _check(type(value) is int and 0 <= value <= 2**62, "a count")
    return int(value)


def _real(value: Any) -> float:
    _check(type(value) is float and 0 <= value < np.inf, "a number")
    return float(value)


def _random_state(state: Any) -> dict[str, Any]:
    """Returns the state of a PCG64 generator, once it is sure to be one."""
    inner = state["state"]
    _check(state["bit_generator"] == "PCG64", "bit_generator")
    for number, bits in ((inner["state"], 128), (inner["inc"], 128), (state["has_uint32"], 1), (state["uinteger"], 32)):
        _check(type(number) is int and 0 <= number < 2**bits, "random_state")
    return {
        "bit_generator": "PCG64",
        "state": {"state": inner["state"], "inc": inner["inc"]},
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }
