"""An environment of Brax, stepped where the policy is. Ant needs a GPU; the inverted pendulum learns on two cores.

    pip install brax
    python examples/brax_environment.py            # arguments are settings, such as seed=2 total_updates=6000

`environment.settings={name: ant}` chooses another environment.
"""

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
from brax import envs

sys.path.insert(1, str(Path(__file__).parents[1]))  # finds apex_jax if it is not installed


class Brax:
    """Any environment of `brax.envs` as apex_jax wants it; its time limit is environment.max_episode_frames."""

    def __init__(self, name: str = "inverted_pendulum", **settings: Any):
        self.environment = envs.get_environment(name, **settings)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (self.environment.observation_size,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (self.environment.action_size,), np.float32)

    def reset(self, key: jax.Array) -> tuple[jax.Array, envs.State]:
        """Starts an episode."""
        state = self.environment.reset(key)
        return state.obs, state

    def step(self, key: jax.Array, state: envs.State, action: jax.Array) -> tuple:
        """Returns observation, state, reward, terminated, truncated, and the environment's metrics."""
        state = self.environment.step(state, action)
        return state.obs, state, state.reward, state.done, False, state.metrics


if __name__ == "__main__":
    from apex_jax.main import main

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the program's processes find this file
    frames = [f"{part}.max_episode_frames=1000" for part in ("environment", "evaluator")]
    own = ["environment.task=jax:brax_environment:Brax", "environment.frame_skip=1", *frames]
    sys.argv[1:] = ["--config", "walker", *own, *sys.argv[1:]]
    sys.exit(main())
