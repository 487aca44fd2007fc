"""The replay server's journal: it records every event, and restores the replay when the server starts again.

Segments and welcomes are written to the log before the server answers them. A thread writes snapshots of the
priorities, the counters and the random state. If the server is killed, the log and the newest snapshot restore
everything except the priority updates and the counts of refused segments since the snapshot: each segment gets its
priorities of the snapshot, or its initial ones if it is newer.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from apex_jax.config import Config
from apex_jax.replay.buffer import ReplayBuffer
from apex_jax.replay.experience_log import SEGMENT, ExperienceLog, LogFile, Record, sync
from apex_jax.replay.header import Header
from apex_jax.replay.ledger import Ledger
from apex_jax.replay.rate_limiter import RateLimiter
from apex_jax.replay.snapshots import Saved, Snapshots, pack_state, ratio_of
from apex_jax.segment_codec import decode_columns
from apex_jax.types import SegmentRecord, SegmentSpec

_log = logging.getLogger(__name__)

WELCOME = 1  # kind of a record
CLOSE_SECONDS = 20.0  # time limit of the last snapshot, because a spot machine has two minutes to shut down


class SnapshotWriter(threading.Thread):
    """Writes one snapshot. Once the thread has ended, `error` is None if the snapshot is on disk."""

    def __init__(self, log: list[Path], obsolete: list[LogFile], write: Callable[[], None]) -> None:
        """`log`: files that must be on disk before the snapshot; `obsolete`: those that it does not need."""
        super().__init__(name="replay snapshot", daemon=True)
        self.log = log
        self.obsolete = obsolete
        self.error: Exception | None = None
        self._write = write

    def run(self) -> None:
        """Syncs the log files before the snapshot, which relies on them. Runs on the thread."""
        try:
            sync(self.log)
            self._write()
        except Exception as error:
            self.error = error


class Journal:
    """The journal of one replay server, which locks the directory until `close`.

    If replay.journal is false, it neither reads nor writes: the replay is in memory only.
    """

    def __init__(self, config: Config, spec: SegmentSpec, capacity_segments: int, run: str = "") -> None:
        """Opens or creates the journal of the run `run` (empty = not known yet). Raises JournalError."""
        self._is_on_disk = config.replay.journal
        self.directory = Path(config.directory, "replay")
        self.header = Header(self.directory, config.compatibility_key, spec, run)
        self._config = config
        self._spec = spec
        self.log = ExperienceLog(self.directory if self._is_on_disk else None, self.header, capacity_segments)
        self._snapshots = Snapshots(self.directory, self.header)
        self._thread: SnapshotWriter | None = None
        self._obsolete: list[LogFile] = []  # closed files that the newest snapshot does not need
        self._snapshot_errors = 0
        self._snapshot_failure = ""  # of the last snapshot; empty if it succeeded
        self._next_seconds = 0.0  # time at which the next snapshot is due

    @property
    def failures(self) -> list[str]:
        """What cannot be written now, with the path and the reason."""
        return [failure for failure in (self.log.failure, self._snapshot_failure) if failure]

    def metrics(self) -> dict[str, float]:
        """Returns values under the tags of `apex_jax.run.metrics.TAGS`."""
        if not self._is_on_disk:
            return {}
        return {
            "replay/journal_bytes": self.log.num_bytes,
            "replay/journal_errors": self.log.errors + self._snapshot_errors,  # since this server started
        }

    # Events

    def on_segment(self, insertion_id: int, segment: SegmentRecord) -> None:
        """Records a segment that was stored as insertion `insertion_id`."""
        self.log.append(SEGMENT, insertion_id, segment)

    def on_welcome(self, peer_id: int, actor_number: int) -> None:
        """Records the number of an actor."""
        self.log.append(WELCOME, 0, SegmentRecord(peer_id, actor_number, 0, 0, b"", 0))

    def on_run(self, run: str) -> None:
        """Records the run that this server has joined: makes a snapshot due now, which contains it."""
        self.header.run = run
        self.request_snapshot()

    def flush(self, now_seconds: float) -> None:
        """Writes pending records. A disk error is counted, logged once and retried; it does not raise."""
        self.log.flush(now_seconds)

    # Snapshots

    def snapshot_if_due(self, buffer: ReplayBuffer, limiter: RateLimiter, ledger: Ledger, now_seconds: float) -> None:
        """Starts writing a snapshot if one is due and the previous one is complete."""
        if self._thread is not None and not self._thread.is_alive():
            self._take_result()
        if self._thread is None and now_seconds >= self._next_seconds and self._is_on_disk:
            self.snapshot(buffer, limiter, ledger, now_seconds)

    def request_snapshot(self) -> None:
        """Makes a snapshot due now."""
        self._next_seconds = 0.0

    def snapshot(self, buffer: ReplayBuffer, limiter: RateLimiter, ledger: Ledger, now_seconds: float) -> None:
        """Copies the state and starts a thread that writes it; `finish` waits for the thread."""
        self.log.flush(now_seconds)
        arrays = pack_state(self.log.last_event, buffer.state(now_seconds), limiter, self._config, ledger)
        self._next_seconds = now_seconds + self._config.replay.snapshot_interval_seconds
        obsolete = self.log.obsolete_files(buffer.oldest_insertion_id)
        write = partial(self._snapshots.write, arrays)
        self._thread = SnapshotWriter(self.log.paths, obsolete, write)
        self._thread.start()

    def finish(self, buffer: ReplayBuffer, limiter: RateLimiter, ledger: Ledger, now_seconds: float) -> None:
        """Writes the last snapshot; returns when it is on disk or the time limit is over."""
        self.flush(np.inf)
        for is_last in (False, True):
            if is_last and self._is_on_disk:
                self.snapshot(buffer, limiter, ledger, now_seconds)
            if self._thread is not None:
                self._thread.join(CLOSE_SECONDS)
                if self._thread.is_alive():
                    _log.warning("the last snapshot is not written within %.0f s: left out", CLOSE_SECONDS)
                    return
                self._take_result()

    def close(self) -> None:
        """Writes pending records and unlocks the directory."""
        self.flush(np.inf)
        self.log.close()

    def _take_result(self) -> None:
        assert self._thread is not None
        thread, self._thread = self._thread, None
        self._delete_obsolete(thread)
        if thread.error is None:
            if self._snapshot_failure:
                _log.info("snapshots are written to %s again", self.directory)
            self._snapshot_failure = ""
            return
        self._snapshot_errors += 1
        if not self._snapshot_failure:
            message = "cannot write a snapshot to %s (logged once, retried): %s"
            _log.warning(message, self.directory, thread.error or type(thread.error).__name__)
        self._snapshot_failure = f"cannot write a snapshot to {self.directory}: {thread.error}"

    def _delete_obsolete(self, thread: SnapshotWriter) -> None:
        """Deletes the log files that neither of the two kept snapshots needs.

        While snapshots fail, no file is deleted, unless the disk is full, since live segments need the space: then
        those that were obsolete at the previous attempt are deleted.
        """
        is_disk_full = isinstance(thread.error, OSError) and thread.error.errno in (errno.ENOSPC, errno.EDQUOT)
        if thread.error is None or is_disk_full:
            self.log.delete(self._obsolete)
            self._obsolete = [file for file in thread.obsolete if file not in self._obsolete]

    # Restoring

    def restore(self, buffer: ReplayBuffer, limiter: RateLimiter, now_seconds: float) -> Ledger:
        """Fills the empty buffer and the limiter from the journal; returns the ledger.

        Raises JournalError if the journal is of another configuration. Damaged parts are set aside and logged.
        """
        if self._is_on_disk:
            self.header.read()
        saved = self._snapshots.read_newest() if self._is_on_disk else None
        ledger = saved.ledger if saved is not None else Ledger()
        snapshot_event = saved.event if saved is not None else 0
        bodies: deque[tuple[int, bytes]] = deque(maxlen=buffer.capacity_segments)
        inserted_since = 0
        for record in self.log.read():
            if record.event > snapshot_event:
                inserted_since += record.transitions if record.kind == SEGMENT else 0
                _count(ledger, record)
            if record.kind == SEGMENT:
                bodies.append((record.insertion_id, record.body))
        self.log.last_event = max(self.log.last_event, snapshot_event)
        segments = [(insertion_id, body, decode_columns(body, self._spec)["priority"]) for insertion_id, body in bodies]
        buffer.restore(segments, saved.buffer if saved is not None else None, now_seconds)
        self._restore_limiter(limiter, saved, inserted_since)
        self._next_seconds = now_seconds + self._config.replay.snapshot_interval_seconds
        self._log_restored(buffer, saved)
        return ledger

    def _restore_limiter(self, limiter: RateLimiter, saved: Saved | None, inserted_since: int) -> None:
        if saved is None:
            limiter.restore(0, 0, inserted_since)
        elif saved.limiter["ratio"] == ratio_of(self._config):
            limiter.restore(saved.limiter["inserted"], saved.limiter["sampled"], inserted_since)
        else:  # with the new ratio, the surplus of these counters might take hours to disappear
            _log.info("replay.samples_per_insert or min_size_to_sample changed: the ratio is counted from here on")
            limiter.restore(0, 0, saved.limiter["inserted"] + inserted_since)

    def _log_restored(self, buffer: ReplayBuffer, saved: Saved | None) -> None:
        if not buffer.size_segments and saved is None:
            return
        _log.info(
            "restored %d segments (%d transitions) from %s",
            buffer.size_segments,
            buffer.size_transitions,
            self.directory,
        )
        exponent = self._config.replay.priority_exponent
        if saved is not None and saved.buffer.priority_exponent != exponent:
            before = saved.buffer.priority_exponent
            message = "priority_exponent was %g, is now %g: all priorities are back to their initial values"
            _log.info(message, before, exponent)


def _count(ledger: Ledger, record: Record) -> None:
    """Counts an event."""
    if record.kind == WELCOME:
        ledger.highest_actor_number = max(ledger.highest_actor_number, record.sequence)
    elif record.kind == SEGMENT:
        ledger.store(record.peer_id, record.sequence, record.produced, record.transitions)
