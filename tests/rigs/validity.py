"""The invariants of the replay buffer and its sum-tree."""

from __future__ import annotations

import numpy as np

from apex_jax.replay.buffer import ReplayBuffer
from apex_jax.replay.sum_tree import FAN_OUT, SumTree


def check_tree(tree: SumTree) -> None:
    """Asserts that leaves are in range, padding is zero, and every node is the sum of its children."""
    leaves = tree._levels[0]
    assert ((leaves >= 0) & np.isfinite(leaves)).all(), "a leaf is out of range"
    for level, parents in zip(tree._levels, tree._levels[1:], strict=False):
        sums = level.reshape(-1, FAN_OUT).cumsum(axis=1)[:, -1]
        assert (parents[: len(sums)] == sums).all(), "a node is not the sum of its children"
        assert not parents[len(sums) :].any(), "the padding of a level is not zero"
    assert not leaves[tree.capacity :].any(), "the padding of the leaves is not zero"


def check_buffer(buffer: ReplayBuffer) -> None:
    """Asserts that tree, columns and counters are consistent."""
    check_tree(buffer.tree)
    leaves = buffer.tree.get(np.arange(buffer.tree.capacity)).reshape(-1, buffer._frame_slots)
    assert ((leaves > 0).sum(axis=1) == buffer._num_transitions).all(), "leaves above zero are not the transitions"
    assert buffer.size_transitions == buffer._num_transitions.sum(), "size_transitions has drifted"
    assert buffer._body_bytes == sum(map(len, buffer._bodies)), "stored_bytes has drifted"
    first = buffer.inserted_segments - buffer.size_segments
    ids = np.arange(first, buffer.inserted_segments)
    assert (buffer.generations[ids % buffer.capacity_segments] == (ids + 1) % 2**32).all(), "generations differ"
