"""Mean returns and lengths of the games that actors finished, between two reports of the replay server."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from apex_jax.config import Config
from apex_jax.run.metrics import EPSILON_BANDS, NOISE_BANDS, TRAINING_INFO, TRAINING_TAG, Bands, Mean
from apex_jax.transport.messages import EpisodeStatistics
from apex_jax.types import SegmentSpec


@dataclass
class EpisodeMeans:
    """Means over the training games since the last report."""

    bands: Bands
    info_names: tuple[str, ...] = ()  # see `metrics.info`
    episode_return: Mean = field(default_factory=Mean)
    length: Mean = field(default_factory=Mean)
    by_band: dict[str, Mean] = field(default_factory=dict)
    info: dict[str, Mean] = field(default_factory=dict)

    @classmethod
    def of_run(cls, config: Config, spec: SegmentSpec) -> EpisodeMeans:
        """Returns the means of no games yet."""
        return cls(EPSILON_BANDS if spec.action.dtype == "int32" else NOISE_BANDS, config.metrics.info)

    def add(self, message: EpisodeStatistics) -> bool:
        """Adds the games of a message; adds none and returns False if any value is impossible.

        There is no Python loop over the games, since a message may hold thousands.
        """
        exploration, steps = message.exploration, message.episode_steps
        is_finite = np.isfinite(exploration).all() and np.isfinite(message.episode_return).all()
        if not (is_finite and ((exploration >= 0) & (exploration <= self.bands.largest) & (steps >= 0)).all()):
            return False  # one NaN would spoil the means of all actors
        self.episode_return.add(message.episode_return)
        self.length.add(steps)
        for band, returns in self.bands.split(exploration, message.episode_return):
            self.by_band.setdefault(band, Mean()).add(returns)
        for name, numbers in zip(message.info_names.split(), message.info.T, strict=False):
            if name in self.info_names:
                self.info.setdefault(name, Mean()).add(numbers[np.isfinite(numbers)])
        return True

    def take(self) -> dict[str, float]:
        """Returns the means by their tag, none if no game has ended, and begins anew."""
        if not self.length.count:
            return {}
        values = {
            "charts/episodic_return": self.episode_return.result(),
            "charts/episodic_length": self.length.result(),
            **{f"{TRAINING_TAG}{band}": mean.result() for band, mean in self.by_band.items()},
            **{f"{TRAINING_INFO}{name}": mean.result() for name, mean in self.info.items() if mean.count},
        }
        self.episode_return, self.length, self.by_band, self.info = Mean(), Mean(), {}, {}
        return values
