"""Keeps the ratio of drawn to stored transitions, by blocking the faster side."""

from __future__ import annotations

import math

from apex_jax.config import Config
from apex_jax.host.errors import UsageError
from apex_jax.types import SegmentSpec


def least_error_buffer(samples_per_insert: float, largest_insert: int, largest_sample: int) -> float:
    """Returns the smallest error buffer, in samples, with which the two sides of a `RateLimiter` cannot deadlock."""
    return (largest_sample + samples_per_insert * largest_insert) / 2


class RateLimiter:
    """Decides whether more transitions may be stored, and whether more may be drawn.

    The rule (Reverb's sample-to-insert ratio, Cassirer et al. 2021), counted in transitions since the start:

        surplus = samples_per_insert * (inserted - min_size_to_sample) - sampled
        sample n:  filled  and  surplus - n >= -error_buffer
        insert n:  not filled  or  surplus + samples_per_insert * n <= error_buffer

    `inserted` counts every transition ever stored. A replay is filled if its current size is at least
    min_size_to_sample, or if its ring is full (how many transitions fit depends on how many episodes end in them).
    Eviction may lower the size again; while a replay is not filled, inserting is always allowed. If
    samples_per_insert is 0, inserting is always allowed, and drawing whenever the replay is filled.

    No deadlock: both sides wait only if error_buffer - samples_per_insert * n_insert < surplus < n_sample -
    error_buffer, and no such surplus exists from `least_error_buffer` on.
    """

    def __init__(self, min_size_to_sample: int, samples_per_insert: float, error_buffer: float) -> None:
        """`error_buffer`: in samples, at least `least_error_buffer`; samples_per_insert 0 = no limit."""
        self.inserted = 0  # transitions stored, counted by the caller
        self.sampled = 0  # transitions drawn, likewise
        self._min_size = min_size_to_sample
        self._samples_per_insert = samples_per_insert
        self._error_buffer = error_buffer

    def can_insert(self, num_transitions: int, size_transitions: int, is_full: bool = False) -> bool:
        """Returns whether `num_transitions` may be stored, if the replay holds `size_transitions` now."""
        if self._samples_per_insert == 0 or not self._is_filled(size_transitions, is_full):
            return True
        return self._surplus + self._samples_per_insert * num_transitions <= self._error_buffer

    def allowed_samples(self, size_transitions: int, is_full: bool = False) -> float:
        """Returns how many of the `size_transitions` stored may be drawn now, infinity if there is no limit."""
        if not self._is_filled(size_transitions, is_full):
            return 0.0
        return math.inf if self._samples_per_insert == 0 else max(0.0, self._surplus + self._error_buffer)

    def restore(self, inserted: int, sampled: int, inserted_since: int = 0) -> None:
        """Continues from saved counters. `inserted_since`: transitions stored after these were saved.

        The draws since then were not saved. The limiter assumes that these kept the ratio; otherwise inserting would
        wait until the learner has drawn as many again.
        """
        self.inserted, self.sampled = inserted, sampled
        most = max(0.0, self._surplus)
        self.inserted += inserted_since
        if inserted_since:
            self.sampled += max(0, math.ceil(self._surplus - most))

    @property
    def ratio(self) -> float:
        """Transitions drawn per transition stored since there were enough, or could have been drawn ahead of them."""
        ahead = self._error_buffer / (self._samples_per_insert or math.inf)
        return self.sampled / max(1.0, self.inserted - self._min_size + ahead)

    def _is_filled(self, size_transitions: int, is_full: bool) -> bool:
        return size_transitions >= self._min_size or (is_full and size_transitions > 0)

    @property
    def _surplus(self) -> float:
        """Number of samples that drawing is behind the ratio; negative if it is ahead."""
        return self._samples_per_insert * (self.inserted - self._min_size) - self.sampled


def make_limiter(config: Config, spec: SegmentSpec) -> RateLimiter:
    """Returns the run's rate limiter; raises UsageError if actors and learner would wait for each other."""
    replay, insert, draw = config.replay, spec.max_transitions, config.learner.largest_sample
    unit_samples = replay.min_size_to_sample * replay.samples_per_insert  # the samples of replay.error_buffer=1
    least = least_error_buffer(replay.samples_per_insert, insert, draw)
    if unit_samples and replay.error_buffer * unit_samples < least:
        least_fraction = math.ceil(1e3 * least / unit_samples) / 1e3
        raise UsageError(
            f"replay.error_buffer={replay.error_buffer:g}: must be at least {least_fraction:g}, or actors and learner"
            f" would wait for each other for ever: {insert} transitions are stored and {draw} drawn at a time, with"
            f" replay.min_size_to_sample={replay.min_size_to_sample} and"
            f" replay.samples_per_insert={replay.samples_per_insert:g}; raise it, or lower learner.updates_per_call or"
            " learner.batch_size"
        )
    return RateLimiter(
        min_size_to_sample=replay.min_size_to_sample,
        samples_per_insert=replay.samples_per_insert,
        error_buffer=replay.error_buffer * unit_samples,
    )
