"""Mean returns and lengths of the games that actors finished, between two reports of the replay server."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from apex_jax.run.metrics import Bands, Mean
from apex_jax.transport.messages import EpisodeStatistics


@dataclass
class EpisodeMeans:
    """Means over the training games since the last report."""

    bands: Bands
    episode_return: Mean = field(default_factory=Mean)
    length: Mean = field(default_factory=Mean)
    by_band: dict[str, Mean] = field(default_factory=dict)

    def add(self, message: EpisodeStatistics) -> bool:
        """Adds the games of a message; adds none and returns False if any value is impossible.

        The Python work is independent of the number of games, as a message may hold thousands.
        """
        exploration, steps = message.exploration, message.episode_steps
        is_finite = np.isfinite(exploration).all() and np.isfinite(message.episode_return).all()
        if not (is_finite and ((exploration >= 0) & (exploration <= self.bands.largest) & (steps >= 0)).all()):
            return False  # one NaN would spoil the means of all actors
        self.episode_return.add(message.episode_return)
        self.length.add(steps)
        for band, returns in self.bands.split(exploration, message.episode_return):
            self.by_band.setdefault(band, Mean()).add(returns)
        return True
