"""Which fault comes next: each kind befalls each process once before any befalls it again, in an order by chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence


class Deck:
    """A shuffled deck of cards, each a process and a kind of fault; when it has run out, another."""

    def __init__(self, rng: random.Random, names: Sequence[str], kinds: Sequence[str]) -> None:
        self._rng = rng
        self._cards = [(name, kind) for name in names for kind in kinds]
        self._left: list[tuple[str, str]] = []

    def draw(self, can_break: Callable[[str], bool]) -> tuple[str, str] | None:
        """Takes the first card whose process can be broken now, None where there is none: the others keep their turn.

        A second deck begins only after the whole first, so no process is spared for being down at the wrong time.
        """
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        able = [card for card in self._left if can_break(card[0])]
        if not able:
            return None
        self._left.remove(able[0])
        return able[0]
