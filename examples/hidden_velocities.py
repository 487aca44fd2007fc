"""CartPole that shows places without velocities: one observation does not say enough, the newest four do.

python examples/hidden_velocities.py           # arguments are settings, such as environment.frame_stack=1
"""

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium

sys.path.insert(1, str(Path(__file__).parents[1]))  # finds apex_jax if it is not installed


def make(render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """Returns the environment, whose observations are the place of the cart and the angle of the pole."""
    environment = gymnasium.make("CartPole-v1", render_mode=render_mode)
    all_four: Any = environment.observation_space
    places = gymnasium.spaces.Box(all_four.low[::2], all_four.high[::2])
    return gymnasium.wrappers.TransformObservation(environment, lambda observation: observation[::2], places)


if __name__ == "__main__":
    from apex_jax.main import main

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the program's processes find this file
    task = ["environment.task=gymnasium:hidden_velocities:make", "environment.frame_stack=4"]
    sys.argv[1:] = ["--config", "cartpole", *task, *sys.argv[1:]]
    sys.exit(main())
