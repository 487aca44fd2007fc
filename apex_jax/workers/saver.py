"""Decides when the learner saves checkpoints, and when it ends because it cannot save them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from apex_jax.config import LearnerConfig
from apex_jax.host.errors import FatalError
from apex_jax.process import StopSignal
from apex_jax.run.checkpoint import Checkpointer, Progress

FIRST_CHECKPOINT_SECONDS = 45.0  # from the first update to a run's first checkpoint, if the interval is longer
RETRY_SECONDS = 30.0  # backoff after a failed checkpoint, if the interval is longer
LAST_SAVES = 3  # attempts at the last checkpoint, without which its updates would be lost
LAST_PAUSE_SECONDS = 2.0  # between two of these attempts
LAST_SAVE_SECONDS = 30.0  # timeout for these attempts, including a save already in progress


class Saver:
    """Schedules a run's checkpoints; a thread of the checkpointer writes them."""

    def __init__(self, settings: LearnerConfig, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer
        self._settings = settings
        self.first_update_seconds = math.inf  # end of this process's first update call: before, nothing is to be saved
        self._begun_seconds = -math.inf  # start of the last save
        self._gave_up = False  # saving the last checkpoint

    def age_seconds(self, now_seconds: float) -> float:
        """Returns the time since this process last saved a checkpoint, at first since its first update, 0 before."""
        return max(0.0, now_seconds - max(self.checkpointer.saved_seconds, self.first_update_seconds))

    def is_due(self, now_seconds: float) -> bool:
        """Returns whether a checkpoint is due.

        Raises FatalError after `failed_checkpoints_limit` consecutive failures, so that no more updates are lost.
        """
        self._check_failures(now_seconds)
        return now_seconds >= self._due_seconds() and not self.checkpointer.is_saving

    def save(self, state: Any, progress: Progress) -> None:
        """Starts saving a checkpoint."""
        self._begun_seconds = time.monotonic()
        self.checkpointer.save(state, progress)

    def save_last(self, save: Callable[[], None], stop: StopSignal) -> None:
        """Calls `save` until it succeeds. Raises FatalError after LAST_SAVES attempts or LAST_SAVE_SECONDS."""
        until = time.monotonic() + LAST_SAVE_SECONDS
        for attempt in range(LAST_SAVES):
            time.sleep(LAST_PAUSE_SECONDS if attempt else 0.0)
            if not self._wait(stop, until):  # for a save in progress
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
        """Waits until the last checkpoint is saved, unless saving it was given up."""
        self.checkpointer.close(0.0 if self._gave_up else LAST_SAVE_SECONDS)

    def _due_seconds(self) -> float:
        """Returns when the next checkpoint is due; the first one is early, as without it all updates would be lost."""
        interval = self._settings.checkpoint_interval_seconds
        if self.checkpointer.error:
            return self._begun_seconds + min(RETRY_SECONDS, interval)
        if not self.checkpointer.saved_updates:
            interval = min(FIRST_CHECKPOINT_SECONDS, interval)
        return max(self._begun_seconds, self.first_update_seconds) + interval

    def _check_failures(self, now_seconds: float) -> None:
        failed, limit = self.checkpointer.failed_in_a_row, self._settings.failed_checkpoints_limit
        if self.checkpointer.is_saving:  # checkpoints that became due during a slow save count as failed
            failed += int((now_seconds - self._begun_seconds) / self._settings.checkpoint_interval_seconds)
        if 0 < limit <= failed:
            self._gave_up = True
            reason = self.checkpointer.error or "the disk does not answer"
            fix = "make room, or raise learner.failed_checkpoints_limit (0 = no limit)"
            raise FatalError(f"{failed} checkpoints in a row could not be saved: {reason}; {fix}")

    def _wait(self, stop: StopSignal, until: float) -> bool:
        """Waits until no save is in progress; returns False on timeout."""
        while self.checkpointer.is_saving and time.monotonic() < until:
            stop.beat()
            time.sleep(0.02)
        return not self.checkpointer.is_saving
