"""What ends a run, and how far it is on the way there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from apex_jax.config import Config, LearnerConfig


class Limit(NamedTuple):
    """What ends the run: how far it is, where the end is, and how that is said."""

    at: float
    end: float
    text: str


def limits_of(config: Config, updates: int, environment_steps: int, seconds: float) -> list[Limit]:
    """Returns the limits that the run has; `seconds`: of learning, over all starts of the run."""
    frames, minutes = environment_steps * config.environment.frame_skip, seconds / 60
    limits = (
        Limit(updates, config.total_updates, f"{updates} updates"),
        Limit(frames, config.total_environment_frames, f"{frames} environment frames"),
        Limit(minutes, config.total_minutes, f"{minutes:.1f} minutes"),
    )
    return [limit for limit in limits if limit.end]


def learning_rate_share(learner: LearnerConfig, limits: Sequence[Limit]) -> float:
    """Returns 1 up to `learning_rate_decay_start`, `final_learning_rate_share` at the limit that is next."""
    done = max((limit.at / limit.end for limit in limits), default=0.0)
    fallen = (done - learner.learning_rate_decay_start) / (1 - learner.learning_rate_decay_start)
    return 1 - (1 - learner.final_learning_rate_share) * min(1.0, max(0.0, fallen))
