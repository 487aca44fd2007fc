"""Batches over several servers are those of one server that holds everything; equal fractions are unbiased."""

from __future__ import annotations

import numpy as np
import pytest

from apex_jax.replay.fractions import MIN_PROBABILITY, counts_of, fractions_of, importance_weights
from apex_jax.transport.messages import IndexBatches
from apex_jax.types import MAX_SERVERS
from tests.rigs.links import highest


@pytest.mark.parametrize(
    ("totals", "groups", "fractions"),
    [
        ([5.0], 1, [1.0]),
        ([1.0, 3.0], 1, [0.25, 0.75]),
        ([1.0, 0.0, 3.0], 1, [0.25, 0.0, 0.75]),
        ([1.0, 1000.0], 2, [0.5, 0.5]),
        ([1.0, 3.0, 8.0, 0.0], 2, [0.125, 0.375, 0.5, 0.0]),  # servers 0 and 1 are a group
    ],
)
def test_fractions_are_in_proportion_within_a_group_and_equal_between_groups(
    totals: list[float], groups: int, fractions: list[float]
) -> None:
    np.testing.assert_allclose(fractions_of(np.array(totals), groups), fractions)


def test_weights_are_finite_for_the_most_extreme_numbers_that_servers_may_send() -> None:
    totals = np.full(MAX_SERVERS, highest(IndexBatches, "total_priority"))
    probabilities = MIN_PROBABILITY * fractions_of(totals)
    assert importance_weights(probabilities[None], 10.0).tolist() == [[1.0] * MAX_SERVERS]


def test_counts_are_the_fractions_rounded_and_sum_up_to_the_batch() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        fractions = rng.dirichlet(np.full(int(rng.integers(1, 9)), 0.3))
        size = int(rng.integers(1, 600))
        counts = counts_of(fractions, size, rng.random(7))
        assert counts.shape == (7, len(fractions))
        assert counts.dtype == np.int32
        assert (counts.sum(axis=1) == size).all()
        assert (np.abs(counts - fractions * size) < 1 + 1e-6).all()


def test_expected_count_is_exactly_the_share_of_the_batch() -> None:
    """Over a grid of uniforms, the mean of a count is its expectation."""
    fractions = np.array([0.0004, 0.1003, 0.6, 0.2993])
    uniforms = (np.arange(10_000) + 0.5) / 10_000
    np.testing.assert_allclose(counts_of(fractions, 512, uniforms).mean(axis=0), fractions * 512, atol=1e-3)


def test_each_group_gives_exactly_its_part_of_every_batch() -> None:
    """As the update on several devices requires, however its part is divided among the servers of the group."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        groups, servers, part = (int(each) for each in rng.integers(1, 6, size=3))
        totals = rng.random(groups * servers) * 10.0 ** rng.integers(-4, 5, groups * servers)
        counts = counts_of(fractions_of(totals, groups), groups * part, rng.random(9))
        assert (counts.reshape(9, groups, servers).sum(axis=2) == part).all()


@pytest.mark.parametrize("groups", [1, 5])
def test_weighted_mean_of_draws_has_the_expectation_of_a_uniform_mean(groups: int) -> None:
    """With beta = 1 each draw counts 1 / (N P(i)) times: the mean over draws estimates the mean over all transitions.

    The totals of the five servers differ a thousandfold. The expectation is computed by summing over all transitions.
    """
    rng = np.random.default_rng(2)
    powers = [rng.random(size) * scale for size, scale in ((30, 1.0), (50, 1e3), (7, 10.0), (90, 0.5), (20, 30.0))]
    values = [rng.normal(size=part.size) for part in powers]
    fractions = fractions_of(np.array([part.sum() for part in powers]), groups)
    number = sum(part.size for part in powers)
    chances = [fraction * part / part.sum() for fraction, part in zip(fractions, powers, strict=True)]
    assert sum(chance.sum() for chance in chances) == pytest.approx(1.0)
    expected = sum((chance * value / (number * chance)).sum() for chance, value in zip(chances, values, strict=True))
    assert expected == pytest.approx(np.concatenate(values).mean())
    draws = 200_000  # and the same by drawing
    server = rng.choice(5, draws, p=fractions)
    total = 0.0
    for index, (part, value) in enumerate(zip(powers, values, strict=True)):
        drawn = rng.choice(part.size, int((server == index).sum()), p=part / part.sum())
        total += (value[drawn] / (number * chances[index][drawn])).sum()
    spread = np.sqrt(
        sum((value**2 / (number**2 * chance)).sum() for chance, value in zip(chances, values, strict=True))
    )
    assert abs(total / draws - np.concatenate(values).mean()) < 5 * spread / np.sqrt(draws)


def test_weights_are_those_of_the_paper_over_the_largest_of_the_batch() -> None:
    probabilities = np.random.default_rng(3).random((3, 8)) + 1e-3
    weights = (1000 * probabilities) ** -0.4
    expected = weights / weights.max(axis=1, keepdims=True)
    np.testing.assert_allclose(importance_weights(probabilities, 0.4), expected, rtol=1e-6)
    assert importance_weights(probabilities, 0.0).tolist() == np.ones((3, 8)).tolist()
