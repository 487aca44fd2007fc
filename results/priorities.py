"""Trains in one process and compares, at each update, the priorities by which transitions are drawn with new ones.

    python -m results.priorities --config configs/pong_cpu.yaml environment.task=Boxing-v5 total_updates=40000

The last line of output is one JSON object. Everything is by tenth of the run, so that the start is seen apart:

    rank_drawn, rank_all         rank correlation of the stored priority with the one that the update computes for the
                                 same transition: over those that are drawn, and over one draw in 20, which is uniform
    rank_first                   the same where the stored priority is still that of the actor
    scale_first, scale_later     median ratio of the new priority to the stored one: of the actor, of the learner
    age_updates                  median age of a drawn priority, in updates
    top_tenth, effective_share   share of the probability of the tenth with the highest priorities; (sum p)^2 / sum p^2
                                 as a share of the transitions
    undrawn_share                of the transitions that leave the replay, those that were never drawn
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any, ClassVar

import numpy as np
from scipy.stats import spearmanr  # type: ignore[import-untyped]

import apex_jax.replay.replay
from apex_jax.main import main as train
from apex_jax.replay.buffer import PriorityResult, ReplayBuffer, Sample
from apex_jax.types import Columns

UNIFORM_DRAWS = 20  # one in so many
PARTS = 10


class WatchedBuffer(ReplayBuffer):
    """A replay buffer that remembers when each priority was set, and keeps what it sees."""

    made: ClassVar[list[WatchedBuffer]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        leaves = self.tree.leaves.size
        self.set_at, self.draws = np.zeros(leaves, np.int64), np.zeros(leaves, np.int64)
        self.num_draws = self.batches = self.updates = 0
        self.is_uniform = False
        self.seen: list[tuple[int, dict[str, float]]] = []  # by number of updates
        self.made.append(self)

    def insert(self, body: bytes, columns: Columns, now_seconds: float) -> int:
        """Notes what leaves the replay."""
        place = (self.inserted_segments % self.capacity_segments) * self._frame_slots
        leaves = slice(place, place + self._frame_slots)
        if (stored := self.tree.leaves[leaves] > 0).any():
            self.see(undrawn_share=float((self.draws[leaves][stored] == 0).mean()))
        ring_slot = super().insert(body, columns, now_seconds)
        self.set_at[leaves], self.draws[leaves] = self.updates, 0
        return ring_slot

    def sample(self, batches: int, size: int, now_seconds: float) -> Sample:
        """Draws as usual, or uniformly."""
        self.num_draws, self.batches = self.num_draws + 1, batches
        self.is_uniform = self.num_draws % UNIFORM_DRAWS == 0
        sample = super().sample(batches, size, now_seconds)
        if not self.is_uniform:
            return sample
        stored = np.flatnonzero(self.tree.leaves > 0)
        leaves = self._rng.choice(stored, batches * size)
        powers = np.sort(self.tree.leaves[stored])
        top = powers[-max(1, stored.size // 10) :].sum() / powers.sum()
        self.see(top_tenth=float(top), effective_share=float(powers.sum() ** 2 / (powers**2).sum() / stored.size))
        return sample._replace(
            indices=leaves.astype(np.int32),
            generations=self.generations[leaves // self._frame_slots],
            probabilities=np.full(leaves.size, 1 / stored.size),
        )

    def update_priorities(self, indices: np.ndarray, generations: np.ndarray, priorities: np.ndarray) -> PriorityResult:
        """Compares the new priorities with those that they replace."""
        leaves = np.asarray(indices, np.int64)
        stored, is_first = self.tree.leaves[leaves] ** (1 / self._alpha), self.draws[leaves] == 0
        ratio = priorities / np.maximum(stored, 1e-12)
        if self.is_uniform:
            self.see(rank_all=rank(stored, priorities))
        else:
            self.see(
                rank_drawn=rank(stored, priorities), age_updates=float(np.median(self.updates - self.set_at[leaves]))
            )
        if is_first.sum() > 2:
            self.see(
                rank_first=rank(stored[is_first], priorities[is_first]), scale_first=float(np.median(ratio[is_first]))
            )
        if (~is_first).any():
            self.see(scale_later=float(np.median(ratio[~is_first])))
        self.updates += self.batches
        self.set_at[leaves] = self.updates
        self.draws[leaves] += 1
        return super().update_priorities(indices, generations, priorities)

    def see(self, **values: float) -> None:
        """Keeps values under the number of updates so far."""
        self.seen.append((self.updates, values))


def rank(first: np.ndarray, second: np.ndarray) -> float:
    """Returns Spearman's rank correlation; nan if all of one are equal."""
    return float("nan") if np.ptp(first) == 0 or np.ptp(second) == 0 else float(spearmanr(first, second).statistic)


def by_part(buffer: WatchedBuffer) -> dict[str, list[float]]:
    """Returns the mean of each value in each tenth of the run."""
    found: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in range(PARTS)])
    for updates, values in buffer.seen:
        for name, value in values.items():
            found[name][min(PARTS - 1, PARTS * updates // max(1, buffer.updates))].append(value)
    return {
        name: [round(float(np.nanmean(part)), 3) if part else float("nan") for part in parts]
        for name, parts in found.items()
    }


def main() -> int:
    """Trains; prints what was seen. Returns the exit code."""
    apex_jax.replay.replay.ReplayBuffer = WatchedBuffer  # type: ignore[attr-defined,misc]
    sys.argv.append("processes=one")
    code = train()
    if WatchedBuffer.made:
        (buffer,) = WatchedBuffer.made
        print(json.dumps({"arguments": sys.argv[1:], "updates": buffer.updates, **by_part(buffer)}))
    return code


if __name__ == "__main__":
    sys.exit(main())
