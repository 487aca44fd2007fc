"""Invalid actions: an agent learns a game in which it may only play the cards of its hand, in a minute on two cores.

    python examples/masked_cards.py                # arguments are settings, such as seed=2 total_updates=6000

`info["action_mask"]` says which actions are valid. A trained agent takes it as well: `policy(observation, mask)`. For a
file of your own, in its folder: `apex-jax --config cartpole environment.task=gymnasium:my_file:MyEnvironment`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

sys.path.insert(1, str(Path(__file__).parents[1]))  # finds apex_jax if it is not installed

CARDS = 8  # 0 to 7, each once
HAND = 4


class Tricks(gymnasium.Env[np.ndarray, int]):
    """Four tricks: the other player leads a card; a higher one wins, and pays 1.

    The best play wins a trick with the lowest card that can, or loses it with the lowest of all. A card that is not in
    the hand costs 10 and ends the game: with random choices of all eight cards a game would return some -9.5,
    with those of the hand 2.0, with the best play 2.7.
    """

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 1, (2 * CARDS,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(CARDS)  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Deals four cards to each player."""
        super().reset(seed=seed)
        cards = self.np_random.permutation(CARDS)
        self.hand, self.others = set(cards[:HAND].tolist()), cards[HAND:].tolist()
        return self.observe(), self.info()

    def step(self, card: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Plays a card on the one that was led."""
        if card not in self.hand:
            return self.observe(), -10.0, True, False, self.info()
        self.hand.remove(card)
        won = card > self.others.pop()
        return self.observe(), float(won), not self.hand, False, self.info()

    def observe(self) -> np.ndarray:
        """Returns the hand, and the card that was led."""
        observation = np.zeros(2 * CARDS, np.float32)
        observation[list(self.hand)] = 1
        observation[[CARDS + card for card in self.others[-1:]]] = 1
        return observation

    def info(self) -> dict[str, Any]:
        """Returns the mask: 1 for each card of the hand. After the last card there is none, and the game is over."""
        return {"action_mask": np.isin(np.arange(CARDS), list(self.hand)).astype(np.int8)}


if __name__ == "__main__":
    from apex_jax.main import main

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the program's processes find this file
    own = ["environment.task=gymnasium:masked_cards:Tricks", "environment.own_processes=false"]
    sys.argv[1:] = ["--config", "cartpole", *own, *sys.argv[1:]]
    sys.exit(main())
