"""Specification of the rate limiter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_jax.replay.rate_limiter import RateLimiter, least_error_buffer


def limiter_of(min_size: int = 100, ratio: float = 2.0, error_buffer: float = 50.0) -> RateLimiter:
    return RateLimiter(min_size, ratio, error_buffer)


def test_nothing_is_drawn_below_the_minimum_size() -> None:
    limiter = limiter_of()
    limiter.insert(99)
    assert not limiter.can_sample(1, 99)
    limiter.insert(1)
    assert limiter.can_sample(1, 100)


def test_full_replay_allows_drawing_below_the_minimum_size() -> None:
    limiter = limiter_of()
    limiter.insert(1000)
    assert limiter.can_sample(1, 99, is_full=True)
    assert not limiter.can_insert(1, 99, is_full=True), "or the ratio would not hold"
    assert not limiter.can_sample(1, 0, is_full=True), "of segments in which no transition starts"


def test_inserting_is_always_allowed_below_the_minimum_size() -> None:
    limiter = limiter_of()
    limiter.insert(1000)
    assert not limiter.can_insert(1, 100)
    assert limiter.can_insert(1, 99)


def test_without_a_ratio_only_the_minimum_size_limits_drawing() -> None:
    limiter = limiter_of(ratio=0.0, error_buffer=0.0)
    limiter.insert(10**12)
    assert limiter.can_insert(10**9, 100)
    assert limiter.can_sample(10**9, 100)
    limiter.sample(10**15)
    assert limiter.can_insert(10**9, 100)
    assert limiter.can_sample(10**9, 100)
    assert not limiter.can_sample(1, 99)


def test_drawing_stops_when_the_error_buffer_is_used_up() -> None:
    limiter = limiter_of()
    limiter.insert(100)
    assert limiter.can_sample(50, 100)
    assert not limiter.can_sample(51, 100)
    limiter.sample(50)
    assert not limiter.can_sample(1, 100)
    limiter.insert(3)
    assert limiter.can_sample(6, 100)
    assert not limiter.can_sample(7, 100)


def test_inserting_stops_when_the_error_buffer_is_used_up() -> None:
    limiter = limiter_of()
    limiter.insert(100)
    assert limiter.can_insert(25, 100)
    assert not limiter.can_insert(26, 100)
    limiter.insert(25)
    assert not limiter.can_insert(1, 100)
    limiter.sample(6)
    assert limiter.can_insert(3, 100)
    assert not limiter.can_insert(4, 100)


@pytest.mark.parametrize("faster", ["actors", "learner"])
def test_ratio_is_kept_whichever_side_is_faster(faster: str) -> None:
    limiter = limiter_of(ratio=4.0)
    for _ in range(2000):
        for _ in range(10 if faster == "actors" else 1):
            if limiter.can_insert(10, limiter.inserted):
                limiter.insert(10)
        for _ in range(10 if faster == "learner" else 1):
            if limiter.can_sample(20, limiter.inserted):
                limiter.sample(20)
    assert limiter.inserted > 1000
    assert abs(4.0 * (limiter.inserted - 100) - limiter.sampled) <= 50.0


@settings(max_examples=100, deadline=None)
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
        assert limiter.can_insert(largest_insert, size) or limiter.can_sample(largest_sample, size)
        num_inserted, num_drawn = int(rng.integers(1, largest_insert + 1)), int(rng.integers(1, largest_sample + 1))
        if rng.random() < 0.5 and limiter.can_insert(num_inserted, size):
            limiter.insert(num_inserted)
            evicted = int(rng.integers(0, 2 * largest_insert)) if size + num_inserted > capacity else 0
            size = max(0, min(size + num_inserted, capacity) - evicted)
        elif limiter.can_sample(num_drawn, size):
            limiter.sample(num_drawn)
