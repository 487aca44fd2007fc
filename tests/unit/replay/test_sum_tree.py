"""Specification of the sum-tree."""

from __future__ import annotations

import numpy as np
import pytest

from apex_jax.replay.sum_tree import SumTree
from tests.rigs.validity import check_tree


class NaiveSumTree:
    """The slow twin: a list of leaves, walked from the left."""

    def __init__(self, capacity: int) -> None:
        self.leaves = [0.0] * capacity

    def set(self, indices: np.ndarray, values: np.ndarray) -> None:
        for index, value in zip(indices, values, strict=True):
            self.leaves[index] = float(value)

    def find(self, target: float) -> int:
        running = 0.0
        for index, value in enumerate(self.leaves):
            running += value
            if running > target:
                return index
        raise AssertionError("target is beyond the total")


def of_all_magnitudes(rng: np.random.Generator) -> tuple[float, ...]:
    values = np.where(rng.random(600) < 0.7, 0.0, 10.0 ** rng.uniform(-320, 300, 600))
    values[rng.integers(600)] = 1.0
    return tuple(values)


@pytest.mark.parametrize("seed", range(10))
def test_agrees_with_a_naive_sum_tree_under_random_operations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.choice([1, 2, 7, 8, 9, 64, 65, 300, 513, 700]))
    tree, naive = SumTree(capacity), NaiveSumTree(capacity)
    for _ in range(60):
        size = int(rng.integers(0, 40))
        values = rng.integers(0, 4, size).astype(np.float64)  # whole numbers: every sum is exact in any order
        if rng.random() < 0.5 or size > capacity:
            indices = rng.integers(0, capacity, size)
            tree.set(indices, values)
        else:
            start = int(rng.integers(0, capacity - size + 1))
            indices = np.arange(start, start + size)
            tree.set_range(start, values)
        naive.set(indices, values)
        check_tree(tree)
        assert tree.total == sum(naive.leaves)
        np.testing.assert_array_equal(tree.get(np.arange(capacity)), naive.leaves)
        if tree.total > 0:
            targets = np.concatenate([rng.random(8) * tree.total, np.floor(rng.random(8) * tree.total)])
            assert tree.find(targets).tolist() == [naive.find(target) for target in targets]


@pytest.mark.parametrize("values", [
    (1e-300, 1e300, 0.0, 1e-300),
    (1e300, 1e-300, 0.0),
    (0.0, 5e-324, 0.0),
    (5e-324, 0.0, 5e-324, 1e-310, 0.0),
    (0.1, 0.2, 0.3, 0.0) * 30,
    (0.0, 1.0, 1e-17, 0.0) * 40,
    (0.0,) * 511 + (1e-12,),
    (1e300,) + (0.0,) * 510 + (1.0, 0.0),
    (1.0,) + (2.0**-53,) * 5 + (0.0,) * 94,  # the node's sum is above the running sum of its children
    *(of_all_magnitudes(np.random.default_rng(seed)) for seed in range(10)),
])  # fmt: skip
def test_leaf_of_zero_is_never_found_despite_rounding(values: tuple[float, ...]) -> None:
    rng, tree = np.random.default_rng(0), SumTree(len(values))
    tree.set_range(0, np.array(values))
    targets = np.concatenate([rng.random(200), [0.0, 1.0, 2.0, np.inf]]) * tree.total
    edges = np.concatenate([tree.get(np.arange(tree.capacity)).cumsum(), [tree.total]])
    found = tree.find(np.concatenate([targets, edges, np.nextafter(edges, 0), np.nextafter(edges, np.inf)]))
    assert (found >= 0).all()
    assert (found < tree.capacity).all()
    assert (tree.get(found) > 0).all()


def test_the_largest_values_do_not_overflow_the_total() -> None:
    tree = SumTree(1000)
    tree.set_range(0, np.full(1000, np.finfo(np.float64).max / 2000))
    assert np.isfinite(tree.total)
