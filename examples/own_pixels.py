"""Pixels of your own: an agent finds the goal in a grid of 8x8 cells, drawn as 64x64 pixels in color.

    python examples/own_pixels.py                  # arguments are settings, such as seed=2 total_updates=6000

For a file of your own, in its folder: `apex-jax --config pixels environment.task=gymnasium:my_file:MyEnvironment`
(or `python PATH/main.py ...`).
"""

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

sys.path.insert(1, str(Path(__file__).parents[1]))  # finds apex_jax if it is not installed

CELLS, PIXELS = 8, 8  # of a side; of a cell's side
MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])  # up, down, left, right


class Grid(gymnasium.Env[np.ndarray, int]):
    """The goal pays 1 and ends the episode, which has 50 steps otherwise: random moves find it in 3 of 10 episodes."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - the form that Gymnasium wants

    def __init__(self, steps: int = 50, render_mode: str | None = None):
        self.observation_space = gymnasium.spaces.Box(0, 255, (CELLS * PIXELS, CELLS * PIXELS, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))  # type: ignore[assignment]
        self.steps, self.render_mode = steps, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode: agent and goal are in two different cells."""
        super().reset(seed=seed)
        self.time = 0
        agent, goal = self.np_random.choice(CELLS**2, 2, replace=False)
        self.agent, self.goal = (np.array(divmod(int(cell), CELLS)) for cell in (agent, goal))
        return self.render(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Moves the agent by one cell; a wall stops it."""
        self.time += 1
        self.agent = np.clip(self.agent + MOVES[action], 0, CELLS - 1)
        found = bool((self.agent == self.goal).all())
        return self.render(), float(found), found, self.time == self.steps, {}

    def render(self) -> np.ndarray:  # type: ignore[override]
        """Returns the grid, which is the observation and the film."""
        cells = np.zeros((CELLS, CELLS, 3), np.uint8)
        cells[tuple(self.goal)] = (240, 200, 40)
        cells[tuple(self.agent)] = (60, 160, 240)
        return cells.repeat(PIXELS, axis=0).repeat(PIXELS, axis=1)


if __name__ == "__main__":
    from apex_jax.main import main

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the program's processes find this file
    sys.argv[1:] = ["--config", "pixels", "environment.task=gymnasium:own_pixels:Grid", *sys.argv[1:]]
    sys.exit(main())
