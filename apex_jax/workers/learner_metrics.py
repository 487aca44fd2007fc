"""What the learner tells of itself between two writes of its metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from apex_jax.agent.algorithm import UpdateOutput
from apex_jax.metrics import Mean, MetricsWriter, RateMeter, resident_memory_bytes
from apex_jax.transport.messages import IndexBatches


class LearnerMetrics:
    """Adds up update calls and waiting time, and writes them under the tags of `apex_jax.metrics.TAGS`."""

    def __init__(self, writer: MetricsWriter):
        self.waited_seconds = 0.0  # in all, for batches
        self._writer = writer
        self._update_rate, self._wait_rate = RateMeter(), RateMeter()
        self._priority, self._age = Mean(), Mean()
        self._means: defaultdict[str, Mean] = defaultdict(Mean)  # of the algorithm's own metrics, by tag
        self._priority_max = 0.0
        self._samples_per_insert = 0.0
        self._rates: dict[str, float] = {}

    def add(self, batches: IndexBatches, output: UpdateOutput) -> None:
        """Counts an update call whose output has come back from the device, as NumPy arrays."""
        for tag, metric in output.metrics.items():
            self._means[tag].add(metric)
        self._priority.add(output.priorities)
        self._priority_max = max(self._priority_max, float(np.max(output.priorities)))
        self._age.add(batches.age_seconds)
        self._samples_per_insert = batches.samples_per_insert

    def rates(self) -> dict[str, float]:
        """Returns the rates last written, from any thread."""
        return self._rates

    def write(
        self,
        frames: int,
        updates: int,
        elapsed_seconds: float,
        learning_rate: float,
        weights_version: int,
        dropped: Counter[str],
        incidents: Mapping[str, float],
    ) -> None:
        """Writes what has come since the last call, at `frames` environment frames.

        `dropped` counts by reason; `incidents`: values under their tags, of checkpoints, their copy and the link.
        """
        self._rates = {
            "updates_per_second": self._update_rate.update(updates),
            "wait_seconds_share": min(1.0, self._wait_rate.update(self.waited_seconds)),
        }
        values = {
            "charts/updates_per_second": self._rates["updates_per_second"],
            "charts/learning_rate": learning_rate,
            "charts/elapsed_minutes": elapsed_seconds / 60,
            "learner/updates": updates,
            "learner/weights_version": weights_version,
            "learner/wait_seconds_share": self._rates["wait_seconds_share"],
            "system/resident_memory_bytes": resident_memory_bytes(),
            **incidents,
        }
        if self._priority.count:
            values |= {tag: mean.result() for tag, mean in self._means.items()}
            values |= {
                "losses/priority_mean": self._priority.result(),
                "losses/priority_max": self._priority_max,
                "replay/sample_age_seconds": self._age.result(),
                "replay/samples_per_insert": self._samples_per_insert,
            }
        values |= {f"replay/dropped_{reason}": number for reason, number in dropped.items()}
        self._means.clear()
        self._priority.reset()
        self._age.reset()
        self._priority_max = 0.0
        self._writer.write(frames, values)
