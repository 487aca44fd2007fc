"""The order of faults: random, but each process gets each kind once before any is repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence


class Deck:
    """A shuffled deck of pairs of a process and a kind of fault; an empty deck is replaced."""

    def __init__(self, rng: random.Random, cards: Sequence[tuple[str, str]]) -> None:
        self._rng = rng
        self._cards = cards
        self._left: list[tuple[str, str]] = []

    def draw(self, can_break: Callable[[str], bool]) -> tuple[str, str] | None:
        """Takes the first pair whose process can be broken now, or None; the others keep their order.

        A second deck begins only after the whole first, so no process is spared for being down at the wrong time.
        """
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        able = [card for card in self._left if can_break(card[0])]
        if not able:
            return None
        self._left.remove(able[0])
        return able[0]
