"""Pictures and numbers in one observation: an agent fetches the thing that a number names, of two in a picture.

    python examples/picture_and_numbers.py         # arguments are settings, such as seed=2 total_updates=6000

Which part is an image, and that the others are numbers, is found out from the `Dict`, and printed at the start. Whoever
sees one part alone gets 0 in the mean: see="picture" and see="wanted" in environment.settings show it.
"""

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

sys.path.insert(1, str(Path(__file__).parents[1]))  # finds apex_jax if it is not installed

CELLS, PIXELS = 4, 8  # of a side; of a cell's side
MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])  # up, down, left, right
COLORS = ((240, 200, 40), (60, 200, 90), (60, 160, 240))  # of thing 0, thing 1, and the agent


class Errand(gymnasium.Env[Any, Any]):
    """The wanted thing pays 1, the other one -1; either ends the episode, as do 30 steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012 - the form that Gymnasium wants

    def __init__(self, see: str = "", render_mode: str | None = None):
        picture = spaces.Box(0, 255, (CELLS * PIXELS, CELLS * PIXELS, 3), np.uint8)
        both = spaces.Dict(picture=picture, wanted=spaces.Discrete(2))
        self.observation_space = both[see] if see else both
        self.action_space = spaces.Discrete(len(MOVES))
        self.see, self.render_mode = see, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode: things and agent are in three different cells."""
        super().reset(seed=seed)
        cells = self.np_random.choice(CELLS**2, 3, replace=False)
        self.things, self.agent = np.stack(np.divmod(cells[:2], CELLS), 1), np.array(divmod(int(cells[2]), CELLS))
        self.wanted, self.time = int(self.np_random.integers(2)), 0
        return self.observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Moves the agent by one cell; a wall stops it."""
        self.time += 1
        self.agent = np.clip(self.agent + MOVES[action], 0, CELLS - 1)
        found = (self.things == self.agent).all(axis=1)
        reward = float(found[self.wanted]) - float(found[1 - self.wanted])
        return self.observe(), reward, bool(found.any()), self.time == 30, {}

    def observe(self) -> Any:
        """Returns both parts, or the one that is seen."""
        both = {"picture": self.render(), "wanted": self.wanted}
        return both[self.see] if self.see else both

    def render(self) -> np.ndarray:  # type: ignore[override]
        """Returns the picture, which is the film, too."""
        cells = np.zeros((CELLS, CELLS, 3), np.uint8)
        for place, color in zip((*self.things, self.agent), COLORS, strict=True):
            cells[tuple(place)] = color
        return cells.repeat(PIXELS, axis=0).repeat(PIXELS, axis=1)


if __name__ == "__main__":
    from apex_jax.main import main

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the program's processes find this file
    task = "environment.task=gymnasium:picture_and_numbers:Errand"
    # One step, because a random one may end at the wrong thing; each is worth a tenth.
    settings = ["algorithm.n_step=1", "algorithm.discount=0.9", "total_minutes=3"]
    sys.argv[1:] = ["--config", "pixels", task, *settings, *sys.argv[1:]]
    sys.exit(main())
