"""A sum-tree: draws leaves in proportion to their values, a batch at a time."""

from __future__ import annotations

import itertools

import numpy as np

# A NumPy call costs more than the arithmetic of a small batch, so nodes are wide and the tree is low. Measured at 2^20
# leaves, find + set of 512 of them: fan-out 2, 4, 8, 16, 32 take 248, 156, 153, 165, 223 us under a root of up to 8192
# children, which one cumsum and one searchsorted descend; fan-out 8 up to a root of 8 takes 246 us.
FAN_OUT = 8
MAX_ROOT_CHILDREN = 8192


class SumTree:
    """Holds one non-negative value a leaf, and the sum of each node's children.

    A node's sum is always computed anew from its children, never changed by a difference, and always in the same order
    of additions: the tree is a function of its leaves alone, bit for bit, so nothing can drift.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a sum-tree of {capacity} leaves cannot hold anything: capacity must be at least 1")
        self.capacity = capacity
        self.max_value = float(np.finfo(np.float64).max) / (2 * capacity)  # so that no sum of leaves overflows
        self._levels = [np.zeros(_padded(capacity))]  # leaves first, the children of the root last
        while self._levels[-1].size > MAX_ROOT_CHILDREN:
            self._levels.append(np.zeros(_padded(self._levels[-1].size // FAN_OUT)))
        # From the leaves up: a level seen as [node, child], and the level that holds the sums of those nodes.
        self._edges = [(level.reshape(-1, FAN_OUT), above) for level, above in itertools.pairwise(self._levels)]

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return float(self._levels[-1].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(level.nbytes for level in self._levels)

    def get(self, indices: np.ndarray) -> np.ndarray:
        """Returns float64[*N], the values of the leaves int[*N]; `ValueError` for an index out of range."""
        self._check_indices(indices)
        return self._levels[0].take(indices)

    def set(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Sets leaves int[N] to float64[N]; where an index stands twice the last value holds.

        `ValueError`, and nothing is changed, for an index out of range or a value that is NaN, negative or above
        `max_value`.
        """
        if indices.shape != values.shape:
            raise ValueError(f"{indices.shape} indices for {values.shape} values: each leaf needs its own value")
        self._check_indices(indices)
        self._check_values(values)
        self._levels[0][indices] = values
        nodes = indices
        for children, parents in self._edges:
            nodes = nodes // FAN_OUT  # a node that stands twice is computed twice: np.unique costs more than it saves
            parents[nodes] = _sums(children.take(nodes, axis=0))

    def set_range(self, start: int, values: np.ndarray) -> None:
        """Sets the leaves from `start` on to float64[N]; errors as in `set`."""
        stop = start + values.size
        if not 0 <= start <= stop <= self.capacity:
            raise ValueError(f"leaves {start} to {stop - 1} are not all in [0, {self.capacity - 1}]: nothing was set")
        self._check_values(values)
        self._levels[0][start:stop] = values
        for children, parents in self._edges:
            start, stop = start // FAN_OUT, -(-stop // FAN_OUT)
            parents[start:stop] = _sums(children[start:stop])

    def find(self, targets: np.ndarray) -> np.ndarray:
        """Returns int64[N], the leaf in which the running sum of all leaves passes each target float64[N].

        A child is entered only where the running sum *grows* beyond the target, and a target at or above the sum of a
        node (by rounding, or because it is `total`) counts as just below it: so a leaf of value zero is never
        returned, whatever is rounded on the way. `ValueError` for a negative or NaN target, or if all leaves are zero.
        """
        if not (targets >= 0).all():
            raise ValueError(
                f"targets must be in [0, {self.total}], got {targets[~(targets >= 0)][0]}: no leaf is there"
            )
        running = np.cumsum(self._levels[-1])
        if running[-1] <= 0:
            raise ValueError("every leaf is zero: there is nothing to find")
        targets = np.minimum(targets, np.nextafter(running[-1], 0))
        nodes: np.ndarray = running.searchsorted(targets, side="right")
        targets = targets - np.concatenate(([0.0], running))[nodes]
        columns = np.arange(targets.size)
        for children, _ in reversed(self._edges):
            sums = _running_sums(children.take(nodes, axis=0))
            targets = np.minimum(targets, np.nextafter(sums[-1], 0))
            child = (sums[1:] <= targets).sum(axis=0)
            targets = targets - sums[child, columns]
            nodes = nodes * FAN_OUT + child
        return nodes

    def check_valid(self) -> None:
        """Asserts what always holds: leaves in range, none in the padding, every node the sum of its children."""
        leaves = self._levels[0]
        assert ((leaves >= 0) & (leaves <= self.max_value)).all(), "a leaf is out of range"
        for children, parents in self._edges:
            used = len(children)
            assert (parents[:used] == _sums(children)).all(), "a node is not the sum of its children"
            assert not parents[used:].any(), "the padding of a level is not zero"
        assert not leaves[self.capacity :].any(), "the padding of the leaves is not zero"

    def _check_indices(self, indices: np.ndarray) -> None:
        if indices.size and not (indices.min() >= 0 and indices.max() < self.capacity):
            raise ValueError(
                f"leaves {indices.min()} to {indices.max()} are not all in [0, {self.capacity - 1}]: nothing was done"
            )

    def _check_values(self, values: np.ndarray) -> None:
        if values.size and not (values.min() >= 0 and values.max() <= self.max_value):  # NaN fails both
            raise ValueError(
                f"values from {values.min()} to {values.max()} are not all in [0, {self.max_value:.3g}]: they would"
                " spoil every sum above them; filter them before"
            )


def _padded(size: int) -> int:
    """Rounds up to whole nodes."""
    return -(-size // FAN_OUT) * FAN_OUT


def _sums(children: np.ndarray) -> np.ndarray:
    """Adds float64[N, FAN_OUT] to float64[N], in halves: element by element, so the result does not depend on N."""
    sums: np.ndarray = np.ascontiguousarray(children.T)
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums.reshape(-1)


def _running_sums(children: np.ndarray) -> np.ndarray:
    """Returns float64[FAN_OUT + 1, N]: row c is the sum of the c children before child c of float64[N, FAN_OUT]."""
    sums = np.empty((FAN_OUT + 1, len(children)))
    sums[0] = 0
    sums[1:] = children.T
    for child in range(2, FAN_OUT + 1):  # 6 us for 512 nodes; np.cumsum(axis=0) takes 19 us
        sums[child] += sums[child - 1]
    return sums
