"""The rate limiter: how far each side may be ahead, that one of them always may go on, and what a restart restores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_jax.replay.rate_limiter import RateLimiter, least_error_buffer

ANY = 10**9


def limiter_of(inserted: int = 0, sampled: int = 0, ratio: float = 2.0, error_buffer: float = 50.0) -> RateLimiter:
    limiter = RateLimiter(100, ratio, error_buffer)
    limiter.inserted += inserted
    limiter.sampled += sampled
    return limiter


@pytest.mark.parametrize(("inserted", "sampled", "size", "largest_insert", "largest_sample"), [
    (99, 0, 99, ANY, 0),  # below the minimum size
    (1000, 0, 99, ANY, 0),  # whatever the ratio
    (100, 0, 100, 25, 50),
    (100, 50, 100, 50, 0),
    (103, 50, 100, 47, 6),
    (125, 0, 100, 0, 100),
    (125, 6, 100, 3, 94),
])  # fmt: skip
def test_each_side_may_be_ahead_of_the_ratio_by_the_error_buffer(
    inserted: int, sampled: int, size: int, largest_insert: int, largest_sample: int
) -> None:
    limiter = limiter_of(inserted, sampled)
    assert limiter.can_insert(largest_insert, size)
    assert limiter.can_insert(largest_insert + 1, size) == (largest_insert == ANY)
    assert limiter.allowed_samples(size) == largest_sample


def test_full_replay_allows_drawing_below_the_minimum_size() -> None:
    limiter = limiter_of(1000)
    assert limiter.allowed_samples(99, is_full=True) >= 1
    assert not limiter.can_insert(1, 99, is_full=True), "or the ratio would not hold"
    assert limiter.allowed_samples(0, is_full=True) < 1, "of segments in which no transition starts"


@pytest.mark.parametrize(("inserted", "sampled"), [(10**12, 0), (10**12, 10**15)])
def test_without_a_ratio_only_the_minimum_size_limits_drawing(inserted: int, sampled: int) -> None:
    limiter = limiter_of(inserted, sampled, ratio=0.0, error_buffer=0.0)
    assert limiter.can_insert(ANY, 100)
    assert limiter.allowed_samples(100) >= ANY
    assert limiter.allowed_samples(99) < 1


@pytest.mark.parametrize("faster", ["actors", "learner"])
def test_ratio_is_kept_whichever_side_is_faster(faster: str) -> None:
    limiter = limiter_of(ratio=4.0)
    for _ in range(2000):
        for _ in range(10 if faster == "actors" else 1):
            if limiter.can_insert(10, limiter.inserted):
                limiter.inserted += 10
        for _ in range(10 if faster == "learner" else 1):
            if limiter.allowed_samples(limiter.inserted) >= 20:
                limiter.sampled += 20
    assert limiter.inserted > 1000
    assert abs(4.0 * (limiter.inserted - 100) - limiter.sampled) <= 50.0


@settings(max_examples=40, deadline=None)
@given(
    min_size=st.integers(1, 300),
    ratio=st.floats(0.01, 64.0),
    spare_buffer=st.sampled_from([0.0, 0.5, 100.0]),
    largest_insert=st.integers(1, 60),
    largest_sample=st.integers(1, 600),
    seed=st.integers(0, 2**32 - 1),
)
def test_at_least_one_side_is_always_allowed(
    min_size: int, ratio: float, spare_buffer: float, largest_insert: int, largest_sample: int, seed: int
) -> None:
    error_buffer = least_error_buffer(ratio, largest_insert, largest_sample) + spare_buffer
    limiter = RateLimiter(min_size, ratio, error_buffer)
    rng = np.random.default_rng(seed)
    capacity = min_size + int(rng.integers(0, 200))
    size = 0
    for _ in range(200):
        assert limiter.can_insert(largest_insert, size) or limiter.allowed_samples(size) >= largest_sample
        num_inserted, num_drawn = int(rng.integers(1, largest_insert + 1)), int(rng.integers(1, largest_sample + 1))
        if rng.random() < 0.5 and limiter.can_insert(num_inserted, size):
            limiter.inserted += num_inserted
            evicted = int(rng.integers(0, 2 * largest_insert)) if size + num_inserted > capacity else 0
            size = max(0, min(size + num_inserted, capacity) - evicted)
        elif limiter.allowed_samples(size) >= num_drawn:
            limiter.sampled += num_drawn


@pytest.mark.parametrize(("inserted", "sampled", "since", "expected"), [
    (100, 360, 1_000, 4_360),  # the ratio held before, so it is taken to have held since
    (100, 340, 1_000, 4_340),  # 20 draws behind before: as many after
    (100, 390, 1_000, 4_360),  # ahead before: not after
    (100, 350, 0, 350),
    (0, 0, 9, 0),  # nothing is drawn while the replay is filling
])  # fmt: skip
def test_draws_that_were_not_saved_are_assumed_to_have_kept_the_ratio(
    inserted: int, sampled: int, since: int, expected: int
) -> None:
    limiter = RateLimiter(10, 4.0, 40.0)
    limiter.restore(inserted, sampled, since)
    assert (limiter.inserted, limiter.sampled) == (inserted + since, expected)
    assert limiter.can_insert(5, 1_000)
    assert limiter.allowed_samples(1_000) >= 8
