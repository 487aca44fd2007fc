"""Plays episodes with a trained agent in Gymnasium: what a program of your own needs to use one.

    python main.py --config pendulum                      # trains, in a minute
    python examples/play.py runs/Pendulum-v1-1            # plays

Gymnasium and EnvPool name these tasks alike: Pendulum-v1, CartPole-v1, Acrobot-v1, MountainCar-v0, HalfCheetah-v4
(which needs `pip install mujoco`). For others, write the same loop around the environment that you have.
"""

import argparse
import sys
from pathlib import Path

import gymnasium

sys.path.append(str(Path(__file__).parents[1]))  # finds apex_jax in a checkout, if it is not installed

from apex_jax import load_policy
from apex_jax.host.errors import RunError
from apex_jax.run.provenance import read_starts


def play(run: str, episodes: int) -> list[float]:
    """Returns the return of each episode, played without exploration."""
    policy = load_policy(run)
    task = read_starts(run)[0]["task"]
    if ":" in task:  # names a module, which somebody else's run could choose
        sys.exit(f"error: {run} was trained on {task}: write this loop around that environment")
    environment = gymnasium.make(task)
    returns = []
    for seed in range(episodes):
        observation, _ = environment.reset(seed=seed)
        policy.reset()  # only agents that see stacks of frames need it
        ended, total = False, 0.0
        while not ended:
            observation, reward, terminated, truncated, _ = environment.step(policy(observation))
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plays episodes with a trained agent in Gymnasium.")
    parser.add_argument("run", help="a run directory, such as runs/Pendulum-v1-1")
    parser.add_argument("--episodes", type=int, default=10, choices=range(1, 1001), metavar="N")
    arguments = parser.parse_args()
    try:
        returns = play(arguments.run, arguments.episodes)
    except (RunError, gymnasium.error.Error) as error:
        sys.exit(f"error: {error}")
    print(f"mean return {sum(returns) / len(returns):.2f} of {len(returns)} episodes:", *(f"{r:.2f}" for r in returns))
