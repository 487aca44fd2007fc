"""Prioritized draws and updates: `apex_jax.replay.sum_tree` against cpprb's PrioritizedReplayBuffer, a tree in C++.

Each side draws a batch, stratified and in proportion to the priorities, computes importance weights, and gives the
drawn transitions new priorities. In cpprb a transition has only one byte, so that little but the tree is timed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable

import numpy as np

from apex_jax.replay.shares import importance_weights
from apex_jax.replay.sum_tree import SumTree
from benchmarks.report import finish, peer, say, target
from benchmarks.timing import medians, ratio, side_by_side

ALPHA, BETA = 0.6, 0.4
SIZES = (2**16, 2**18, 2**20, 2**21)
COMPARED_SIZES = (2**20, 2**21)
BATCH_SIZES = (64, 512, 4096)
FILL = 2**16  # leaves per call


def ours(num_leaves: int, batch_size: int, rng: np.random.Generator) -> Callable[[], None]:
    """Returns a function that draws a batch from a full tree, computes its weights and updates its priorities."""
    tree = SumTree(num_leaves)
    for start in range(0, num_leaves, FILL):
        tree.set_range(start, rng.random(FILL) ** ALPHA)
    strata = np.arange(batch_size)
    new_priorities = rng.random(batch_size).astype(np.float32)

    def call() -> None:
        leaves = tree.find((strata + rng.random(batch_size)) * (tree.total / batch_size))
        importance_weights(tree.get(leaves)[None], BETA)
        tree.set(leaves, new_priorities.astype(np.float64) ** ALPHA)

    return call


def theirs(num_leaves: int, batch_size: int, rng: np.random.Generator) -> Callable[[], None]:
    """Returns the same function for cpprb."""
    buffer = peer("cpprb").PrioritizedReplayBuffer(num_leaves, {"x": {"dtype": np.uint8}}, alpha=ALPHA)
    for _ in range(0, num_leaves, FILL):
        buffer.add(x=np.zeros(FILL, np.uint8), priorities=rng.random(FILL))
    new_priorities = rng.random(batch_size).astype(np.float32)

    def call() -> None:
        sample = buffer.sample(batch_size, BETA)
        buffer.update_priorities(sample["indexes"], new_priorities)

    return call


def main() -> None:
    """Measures every size and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring, for each figure")
    seconds = parser.parse_args().seconds
    peer("cpprb")  # ends the benchmark before any measurement if it is not installed
    rng = np.random.default_rng(0)
    microseconds: dict[str, float] = {}
    speedups: dict[str, float] = {}
    for batch_size in BATCH_SIZES:
        for num_leaves in SIZES:
            calls = {"ours": ours(num_leaves, batch_size, rng)}
            if num_leaves in COMPARED_SIZES:
                calls["cpprb"] = theirs(num_leaves, batch_size, rng)
            times = side_by_side(calls, seconds)
            case = f"{batch_size} of 2^{num_leaves.bit_length() - 1}"
            microseconds |= {f"{name}, {case}": 1e6 * median for name, median in medians(times).items()}
            text = f"{case}: {microseconds[f'ours, {case}']:.0f} us"
            if "cpprb" in times:
                speedups[case] = ratio(times["cpprb"], times["ours"])
                text += f", cpprb {microseconds[f'cpprb, {case}']:.0f} us: {speedups[case]:.1f} times as long"
            say(text)
    targets = {f"speedup, {case}": target(speedup, at_least=2.0) for case, speedup in speedups.items()}
    growths = [microseconds[f"ours, {size} of 2^21"] / microseconds[f"ours, {size} of 2^16"] for size in BATCH_SIZES]
    growth = statistics.geometric_mean(growths) / math.log(2**21, 2**16)
    targets["growth from 2^16 to 2^21 leaves, over that of the logarithm"] = target(growth, at_most=1.0)
    finish("sum_tree", {"microseconds": microseconds}, targets)


if __name__ == "__main__":
    main()
