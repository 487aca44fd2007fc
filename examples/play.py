"""Plays episodes with a trained agent, in a window if there is a display: what a program of your own needs to use one.

    python examples/play.py results/lunar_lander/policy --window   # an agent that comes with this repository
    python main.py --config pendulum                               # or train one, in a minute
    python examples/play.py runs/Pendulum-v1-1

`play` is the loop around any environment of Gymnasium, for a program of your own. EnvPool's tasks that Gymnasium does
not have here, such as Pong-v5 and WalkerWalk-v1, are played in EnvPool, as the agent was trained.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # finds apex_jax in a checkout, if it is not installed

from apex_jax import load_policy
from apex_jax.config import Config
from apex_jax.config.load import load_run_to_play
from apex_jax.environments.environment import can_render
from apex_jax.environments.envpool_tasks import make_pool
from apex_jax.host.errors import RunError, UsageError
from apex_jax.policy import Policy


def play(environment: Any, policy: Policy, seed: int) -> float:
    """Returns the return of one episode in an environment of Gymnasium."""
    observation, info = environment.reset(seed=seed)
    policy.reset()  # only agents that see stacks of frames need it
    is_masked = policy.environment_spec.spec.action.is_masked
    ended, total = False, 0.0
    while not ended:
        action = policy(observation, info.get("action_mask") if is_masked else None)
        observation, reward, terminated, truncated, info = environment.step(action)
        total, ended = total + float(reward), terminated or truncated
    return total


def play_in_envpool(config: Config, policy: Policy, seed: int, show: Callable[[Any], None] | None) -> float:
    """Returns the return of one episode in EnvPool, preprocessed as in training; `show` receives each frame."""
    limit = config.evaluator.max_episode_frames
    pool = make_pool(config.environment, np.array([seed]), limit, threads=1, per_step=1, rendered=show is not None)
    observation, _ = pool.reset()
    ended, total = False, 0.0
    while not ended:
        if show is not None:
            show(pool.render()[0])
        observation, reward, terminated, truncated, _ = pool.step(policy(observation))
        total, ended = total + float(reward[0]), bool(terminated[0] or truncated[0])
    pool.close()
    return total


def window() -> Callable[[Any], None]:
    """Opens a window, and returns a function that shows a frame in it."""
    from matplotlib import pyplot

    pictures: list[Any] = []

    def show(frame: Any) -> None:
        if not pictures:
            pyplot.axis("off")
            pictures.append(pyplot.imshow(frame))
        pictures[0].set_data(frame)
        pyplot.pause(0.001)

    return show


def main() -> None:
    """Prints the return of each episode."""
    parser = argparse.ArgumentParser(description="Plays episodes with a trained agent.")
    parser.add_argument("run", help="a run directory, such as runs/Pendulum-v1-1, or the folder of an exported policy")
    parser.add_argument("--episodes", type=int, default=3, choices=range(1, 1001), metavar="N")
    parser.add_argument("--window", action="store_true", help="show the episodes, if the task can be rendered")
    arguments = parser.parse_args()
    try:
        config = load_run_to_play(arguments.run, {})
        # As in evaluations: some Atari games loop for ever without it.
        policy = load_policy(arguments.run, exploration=config.evaluator.epsilon * config.environment.is_atari)
        try:
            environment = gymnasium.make(config.environment.task, render_mode="human" if arguments.window else None)
            returns = [play(environment, policy, seed) for seed in range(arguments.episodes)]
        except gymnasium.error.Error:  # it has no such task, or lacks a package for it
            if config.environment.has_spaces:
                raise
            show = window() if arguments.window and can_render(config) else None
            returns = [play_in_envpool(config, policy, seed, show) for seed in range(arguments.episodes)]
    except (RunError, UsageError, gymnasium.error.Error) as error:
        sys.exit(f"error: {error}")
    print(f"mean return {sum(returns) / len(returns):.2f} of {len(returns)} episodes:", *(f"{r:.2f}" for r in returns))


if __name__ == "__main__":
    main()
