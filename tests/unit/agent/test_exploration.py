"""The ladders of epsilon and of noise, and who stands where on them."""

from __future__ import annotations

import numpy as np
import pytest

from apex_jax.agent.exploration import choose_ladder_indices, epsilon_ladder, noise_ladder
from tests.rigs import reference


@pytest.mark.parametrize("size", [1, 2, 3, 32, 360])
def test_ladder_is_the_paper_formula(size: int) -> None:
    ladder = epsilon_ladder(size, base=0.4, exponent=7.0)
    assert ladder.dtype == np.float32
    np.testing.assert_allclose(ladder, reference.epsilon_ladder(size, 0.4, 7.0), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 32, 360])
@pytest.mark.parametrize(("largest", "smallest"), [(0.8, 0.05), (0.3, 0.3), (10.0, 1e-6)])
def test_noise_ladder_is_geometric_from_largest_to_smallest(size: int, largest: float, smallest: float) -> None:
    ladder = noise_ladder(size, largest, smallest)
    assert ladder.dtype == np.float32
    assert ladder.shape == (size,)
    np.testing.assert_allclose(ladder, reference.noise_ladder(size, largest, smallest), rtol=1e-6)


@pytest.mark.parametrize(("occupants", "count", "ladder_indices"), [
    ([0, 0, 0, 0], 4, [0, 1, 2, 3]),
    ([0, 0, 0, 0, 0], 2, [0, 4]),  # both ends: one actor alone covers all exploration rates
    ([0, 0, 0, 0, 0], 3, [0, 2, 4]),
    ([0, 0, 0, 0, 0], 1, [2]),
    ([1, 0, 1, 0, 1], 2, [1, 3]),  # the places of a dead actor are given again
    ([1, 0, 1, 0, 1], 3, [1, 2, 3]),
    ([0], 3, [0, 0, 0]),  # an actor beyond the ladder shares places
    ([1, 1], 3, [0, 1, 1]),
    ([5, 0, 5, 9], 4, [1, 1, 1, 1]),  # those that others have left
    ([5, 0, 5, 9], 9, [0, 1, 1, 1, 1, 1, 1, 1, 2]),
])  # fmt: skip
def test_new_actor_gets_the_least_occupied_ladder_indices_evenly_spread(
    occupants: list[int], count: int, ladder_indices: list[int]
) -> None:
    before = np.array(occupants)
    chosen = choose_ladder_indices(before, count)
    assert chosen.dtype == np.int32
    assert chosen.tolist() == ladder_indices
    assert before.tolist() == occupants  # the caller's array is not changed


@pytest.mark.parametrize("seed", range(10))
def test_occupation_stays_level_while_actors_come_and_go(seed: int) -> None:
    rng = np.random.default_rng(seed)
    occupants = np.zeros(rng.integers(1, 40), int)
    for _ in range(20):
        count = int(rng.integers(1, 60))
        unlevel = np.ptp(occupants)
        ladder_indices = choose_ladder_indices(occupants, count)
        assert len(ladder_indices) == count
        np.add.at(occupants, ladder_indices, 1)
        assert np.ptp(occupants) <= max(unlevel, 1)
        leaver = rng.random(count) < 0.5
        np.subtract.at(occupants, ladder_indices[leaver], 1)
        assert occupants.min() >= 0
