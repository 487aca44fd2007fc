"""An environment of your own, written in JAX: a boat learns to stop at a buoy, in about a minute on two cores.

    python examples/own_jax_environment.py         # arguments are settings, such as seed=2 total_updates=6000

An actor plays many steps of all environments, and of the policy, in one call of the device. For a file of your own, in
its folder: `apex-jax --config cartpole environment.task=jax:my_file:MyEnvironment` (or `python PATH/main.py ...`).
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(1, str(Path(__file__).parents[1]))  # finds apex_jax if it is not installed


class Sea(NamedTuple):
    """Where everything is: any pytree of arrays whose shapes and dtypes stay as they are."""

    boat: jax.Array
    buoy: jax.Array
    speed: jax.Array
    time: jax.Array


class Docking:
    """The boat drifts; the engine pushes it to the left, not at all, or to the right. Each step costs the distance."""

    def __init__(self, steps: int = 100):
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space: gymnasium.Space = gymnasium.spaces.Discrete(3)
        self.steps = steps

    def reset(self, key: jax.Array) -> tuple[jax.Array, Sea]:
        """Starts an episode: boat and buoy lie somewhere."""
        boat, buoy = jax.random.uniform(key, (2,), minval=-1, maxval=1)
        sea = Sea(boat, buoy, jnp.float32(0), jnp.int32(0))
        return self.observe(sea), sea

    def step(self, key: jax.Array, sea: Sea, action: jax.Array) -> tuple:
        """Returns observation, state, reward, terminated, truncated, and numbers for `metrics.info`."""
        speed = 0.95 * sea.speed + 0.01 * (action - 1)
        sea = Sea(sea.boat + speed, sea.buoy, speed, sea.time + 1)
        distance = jnp.abs(sea.buoy - sea.boat)
        return self.observe(sea), sea, -distance, False, sea.time >= self.steps, {"is_docked": distance < 0.1}

    def observe(self, sea: Sea) -> jax.Array:
        """Returns the way to the buoy, the speed, and the place of the boat."""
        return jnp.array([sea.buoy - sea.boat, 10 * sea.speed, sea.boat])

    def render(self, sea: Sea) -> np.ndarray:
        """Returns a picture for the film."""
        picture = np.full((120, 400, 3), (20, 60, 120), np.uint8)
        for place, size, color in ((sea.buoy, 6, (230, 120, 40)), (sea.boat, 12, (240, 240, 240))):
            x = int(np.clip(200 + 90 * place, size, 400 - size))
            picture[60 - size : 60 + size, x - size : x + size] = color
        return picture


if __name__ == "__main__":
    from apex_jax.main import main

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the program's processes find this file
    own = ["environment.task=jax:own_jax_environment:Docking", "metrics.info=[is_docked]"]  # a curve of its own
    sys.argv[1:] = ["--config", "cartpole", *own, *sys.argv[1:]]
    sys.exit(main())
