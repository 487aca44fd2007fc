"""An environment of your own: a boat learns to stop at a buoy, in about a minute on two cores.

    python examples/own_environment.py             # arguments are settings, such as seed=2 total_updates=6000

Everything else is the program's: actors, replay, learner, evaluations, film. For a file of your own, in its folder:
`apex-jax --config cartpole environment.task=gymnasium:my_file:MyEnvironment` (or `python PATH/main.py ...`).
"""

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

sys.path.insert(1, str(Path(__file__).parents[1]))  # finds apex_jax if it is not installed


class Docking(gymnasium.Env[np.ndarray, int]):
    """The boat drifts; the engine pushes it to the left, not at all, or to the right. Each step costs the distance."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012 - the form that Gymnasium wants

    def __init__(self, steps: int = 100, render_mode: str | None = None):
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)  # type: ignore[assignment]
        self.steps, self.render_mode = steps, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode: boat and buoy lie somewhere."""
        super().reset(seed=seed)
        self.time, self.speed = 0, 0.0
        self.boat, self.buoy = self.np_random.uniform(-1, 1, 2)
        return self.observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Returns the observation, the reward, terminated, truncated, and whatever else there is to know."""
        self.speed = 0.95 * self.speed + 0.01 * (action - 1)
        self.boat += self.speed
        self.time += 1
        distance = abs(self.buoy - self.boat)
        return self.observe(), -distance, False, self.time == self.steps, {"is_docked": distance < 0.1}

    def observe(self) -> np.ndarray:
        """Returns the way to the buoy, the speed, and the place of the boat."""
        return np.array([self.buoy - self.boat, 10 * self.speed, self.boat], np.float32)

    def render(self) -> np.ndarray:  # type: ignore[override]
        """Returns a picture for the film."""
        picture = np.full((120, 400, 3), (20, 60, 120), np.uint8)
        for place, size, color in ((self.buoy, 6, (230, 120, 40)), (self.boat, 12, (240, 240, 240))):
            x = int(np.clip(200 + 90 * place, size, 400 - size))
            picture[60 - size : 60 + size, x - size : x + size] = color
        return picture


if __name__ == "__main__":
    from apex_jax.main import main

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the program's processes find this file
    own = ["environment.task=gymnasium:own_environment:Docking", "metrics.info=[is_docked]"]  # a curve of its own
    sys.argv[1:] = ["--config", "cartpole", *own, *sys.argv[1:]]
    sys.exit(main())
