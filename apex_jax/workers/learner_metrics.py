"""The learner's metrics, accumulated between two writes."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from apex_jax.agent.algorithm import UpdateOutput
from apex_jax.links.sampling_client import Batches
from apex_jax.run.metrics import Mean, RateMeter


class LearnerMetrics:
    """Accumulates update calls and waiting time, for the tags of `apex_jax.run.metrics.TAGS`."""

    def __init__(self) -> None:
        self.waited_seconds = 0.0  # total time spent waiting for batches
        self._update_rate, self._wait_rate = RateMeter(), RateMeter()
        self._priority, self._age = Mean(), Mean()
        self._means: defaultdict[str, Mean] = defaultdict(Mean)  # the algorithm's own metrics, by tag
        self._priority_max = 0.0
        self._samples_per_insert = 0.0

    def add(self, batches: Batches, output: UpdateOutput) -> None:
        """Adds a finished update call, with its output as NumPy arrays."""
        for tag, metric in output.metrics.items():
            self._means[tag].add(metric)
        self._priority.add(output.priorities)
        self._priority_max = max(self._priority_max, float(np.max(output.priorities)))
        self._age.add(batches.drawn.age_seconds)
        self._samples_per_insert = batches.drawn.samples_per_insert

    def take(self, updates: int) -> dict[str, float]:
        """Returns the metrics since the previous call. `updates`: of the run so far."""
        values = {
            "charts/updates_per_second": self._update_rate.update(updates),
            "learner/updates": updates,
            "learner/wait_seconds_share": min(1.0, self._wait_rate.update(self.waited_seconds)),
        }
        if self._priority.count:
            values |= {tag: mean.result() for tag, mean in self._means.items()}
            values |= {
                "losses/priority_mean": self._priority.result(),
                "losses/priority_max": self._priority_max,
                "replay/sample_age_seconds": self._age.result(),
                "replay/samples_per_insert": self._samples_per_insert,
            }
        self._means.clear()
        self._priority.reset()
        self._age.reset()
        self._priority_max = 0.0
        return values
