"""The counters and limits of the run, the learning rate's share at the current point, and when the learner saves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from apex_jax.config import Config, LearnerConfig
from apex_jax.host.errors import FatalError
from apex_jax.process import StopSignal
from apex_jax.run.checkpoint import Checkpointer, Progress
from apex_jax.run.evaluations import return_text
from apex_jax.types import MAX_ENVIRONMENT_STEPS


class Limit(NamedTuple):
    """A limit of the run: the current value, the limit, and a text for users."""

    at: float
    end: float
    text: str


class RunCounters:
    """Updates, environment steps and time of the whole run, across restarts of its learner."""

    def __init__(self, config: Config, progress: Progress) -> None:
        """`progress`: that of the checkpoint from which the learner resumes."""
        self.updates = progress.updates
        self.environment_steps = progress.environment_steps  # of all actors
        self._config = config
        self._saved = progress
        self.first_update_seconds = math.inf  # end of this process's first update call, on the monotonic clock
        self._replay_steps = dict(progress.replay_steps)  # environment steps by replay id

    @property
    def environment_frames(self) -> int:
        """Emulator frames of the environment steps."""
        return self.environment_steps * self._config.environment.frame_skip

    def elapsed_seconds(self) -> float:
        """Returns the learning time of the whole run, which in each process begins with its first update.

        Starting, filling the replay and compiling do not count.
        """
        return self._saved.elapsed_seconds + max(0.0, time.monotonic() - self.first_update_seconds)

    def count_steps(self, replay_id: str, steps: int) -> None:
        """Adds the environment steps that a replay server received since its last batch.

        `steps`: its total, which is lower than before if it lost part of its journal.
        """
        new = max(0, steps - self._replay_steps.get(replay_id, 0))
        self.environment_steps = min(self.environment_steps + new, MAX_ENVIRONMENT_STEPS)  # more could not be sent
        self._replay_steps[replay_id] = steps

    def limits(self) -> list[Limit]:
        """Returns the limits that are set and whose distance is known, unlike that of `evaluator.stop_at_return`."""
        config, frames, minutes = self._config, self.environment_frames, self.elapsed_seconds() / 60
        limits = (
            Limit(self.updates, config.total_updates, f"{self.updates} updates"),
            Limit(frames, config.total_environment_frames, f"{frames} environment frames"),
            Limit(minutes, config.total_minutes, f"{minutes:.1f} minutes"),
        )
        return [limit for limit in limits if limit.end]

    def limit_reached(self, best_return: float = -math.inf) -> str | None:
        """Returns the text of a limit that the run has reached, or None. `best_return`: of all evaluations."""
        if self._config.evaluator.stop_at_return and best_return >= self._config.evaluator.stop_at_return:
            return f"a mean return of {return_text(best_return)} in an evaluation"
        return next((limit.text for limit in self.limits() if limit.at >= limit.end), None)

    def learning_rate_share(self) -> float:
        """Returns 1 up to `learning_rate_decay_start`, then falls to `final_learning_rate_share` at the next limit."""
        learner, done = self._config.learner, max((each.at / each.end for each in self.limits()), default=0.0)
        fallen = (done - learner.learning_rate_decay_start) / (1 - learner.learning_rate_decay_start)
        return 1 - (1 - learner.final_learning_rate_share) * min(1.0, max(0.0, fallen))

    def progress(self, weights_version: int, run_identity: str) -> Progress:
        """Returns the counters for a checkpoint."""
        return self._saved._replace(
            updates=self.updates,
            environment_steps=self.environment_steps,
            elapsed_seconds=self.elapsed_seconds(),
            weights_version=weights_version,
            run_identity=run_identity,
            replay_steps=tuple(self._replay_steps.items()),
        )


# When the learner saves checkpoints, and when it ends because it cannot save them -------------------------------------


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
