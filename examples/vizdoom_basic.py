"""VizDoom's first scenario: the agent sees the screen and its ammunition, and shoots a monster.

    pip install vizdoom                            # has the scenario
    python examples/vizdoom_basic.py               # arguments are settings, such as seed=2 total_minutes=20

A screen of 240x320 pixels would take 230 kB of the replay; each pixel here is the mean of 5x5 of them.
"""

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

sys.path.insert(1, str(Path(__file__).parents[1]))  # finds apex_jax if it is not installed

SHRINK = 5


class Small(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shrinks the part `screen` of observations; the others, numbers, stay as they are."""

    def __init__(self, environment: gymnasium.Env[Any, Any]):
        super().__init__(environment)
        parts = dict(environment.observation_space.items())  # type: ignore[attr-defined]
        height, width, colors = parts["screen"].shape
        parts["screen"] = gymnasium.spaces.Box(0, 255, (height // SHRINK, width // SHRINK, colors), np.uint8)
        self.observation_space = gymnasium.spaces.Dict(parts)

    def observation(self, observation: Any) -> Any:
        """Returns an observation with the small screen."""
        height, width, colors = self.observation_space["screen"].shape  # type: ignore[index]
        blocks = observation["screen"].reshape(height, SHRINK, width, SHRINK, colors)
        return observation | {"screen": blocks.mean(axis=(1, 3)).astype(np.uint8)}


def make(render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """Returns the environment; an action lasts four of Doom's 35 frames a second."""
    import vizdoom.gymnasium_wrapper  # noqa: F401 - registers the environments

    return Small(gymnasium.make("VizdoomBasic-v1", frame_skip=4, render_mode=render_mode))


if __name__ == "__main__":
    from apex_jax.main import main

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the program's processes find this file
    task = ["environment.task=gymnasium:vizdoom_basic:make", "network.normalize_observations=true"]  # of the ammunition
    sys.argv[1:] = ["--config", "pixels", *task, *sys.argv[1:]]
    sys.exit(main())
