"""When the learner's checkpoints are saved, and when a learner that cannot save them ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from apex_jax.checkpoint import Checkpointer, Progress
from apex_jax.config import LearnerConfig
from apex_jax.errors import FatalError
from apex_jax.process import StopSignal

FIRST_CHECKPOINT_SECONDS = 45.0  # of learning, until a run has its first checkpoint, if the interval is longer
RETRY_SECONDS = 30.0  # after a checkpoint that was not saved, if the interval is longer
LAST_SAVES = 3  # attempts at the checkpoint without which a run, or a start of it, would have learned in vain
LAST_PAUSE_SECONDS = 2.0  # between them
LAST_SAVE_SECONDS = 30.0  # that they may take, with one that was under way before them


class Saver:
    """Keeps the times of a run's checkpoints; a thread of the checkpointer writes them."""

    def __init__(self, settings: LearnerConfig, checkpointer: Checkpointer, now_seconds: float) -> None:
        """`now_seconds`: the start of the learner; the interval counts from here."""
        self.checkpointer = checkpointer
        self._settings = settings
        self._begun_seconds = now_seconds  # when the last checkpoint was begun
        self._first_update_seconds = now_seconds  # of this start
        self._gave_up = False  # saving the last checkpoint

    def is_due(self, updates: int, now_seconds: float) -> bool:
        """Tells whether a checkpoint is to be saved now.

        FatalError if so many have failed in a row that somebody would rather know than lose more.
        """
        self._check_failures(now_seconds)
        if not updates:
            self._first_update_seconds = now_seconds  # at the latest
        return now_seconds >= self._due_seconds() and not self.checkpointer.is_saving

    def save(self, state: Any, progress: Progress) -> None:
        """Begins a checkpoint."""
        self._begun_seconds = time.monotonic()
        self.checkpointer.save(state, progress)

    def save_last(self, save: Callable[[], None], stop: StopSignal) -> None:
        """Calls `save` until a checkpoint is saved. FatalError if none can be, or not in time."""
        until = time.monotonic() + LAST_SAVE_SECONDS
        for attempt in range(LAST_SAVES):
            time.sleep(LAST_PAUSE_SECONDS if attempt else 0.0)
            if not self._wait(stop, until):  # for a checkpoint that was under way
                break
            save()
            if not self._wait(stop, until):
                break
            if self.checkpointer.error is None:
                return
        self._gave_up = True
        reason = self.checkpointer.error or f"the disk has not answered for {LAST_SAVE_SECONDS:.0f} s"
        directory = self.checkpointer.directory
        raise FatalError(f"the last updates are lost: {reason}; make {directory} writable, free some space, restart")

    def close(self) -> None:
        """Waits until the last checkpoint is saved, unless that was given up."""
        self.checkpointer.close(0.0 if self._gave_up else LAST_SAVE_SECONDS)

    def _due_seconds(self) -> float:
        """Returns when the next checkpoint is due: a run that has none yet would lose all that it has learned."""
        interval = self._settings.checkpoint_interval_seconds
        if self.checkpointer.error:
            return self._begun_seconds + min(RETRY_SECONDS, interval)
        first = math.inf if self.checkpointer.saved_updates else self._first_update_seconds + FIRST_CHECKPOINT_SECONDS
        return min(self._begun_seconds + interval, first)

    def _check_failures(self, now_seconds: float) -> None:
        failed, limit = self.checkpointer.failed_in_a_row, self._settings.failed_checkpoints_limit
        if self.checkpointer.is_saving:  # then those that have been due since it began are as good as failed
            failed += int((now_seconds - self._begun_seconds) / self._settings.checkpoint_interval_seconds)
        if 0 < limit <= failed:
            self._gave_up = True
            reason = self.checkpointer.error or "the disk does not answer"
            fix = "make room, or raise learner.failed_checkpoints_limit (0 = no limit)"
            raise FatalError(f"{failed} checkpoints in a row could not be saved: {reason}; {fix}")

    def _wait(self, stop: StopSignal, until: float) -> bool:
        """Waits until no checkpoint is under way; returns whether that was in time."""
        while self.checkpointer.is_saving and time.monotonic() < until:
            stop.beat()
            time.sleep(0.02)
        return not self.checkpointer.is_saving
