"""The counters and limits of the run, and the learning rate's share at the current point."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from apex_jax.config import Config
from apex_jax.run.checkpoint import Progress
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
        config, minutes = self._config, self.elapsed_seconds() / 60
        limits = (
            Limit(self.updates, config.total_updates, f"{self.updates} updates"),
            Limit(
                self.environment_frames,
                config.total_environment_frames,
                f"{self.environment_frames} environment frames",
            ),
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
