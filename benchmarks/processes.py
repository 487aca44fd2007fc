"""A step of an environment in a process of its own, in turns with Gymnasium's `AsyncVectorEnv`: sixteen of CartPole.

python -m benchmarks.processes games/bin/python     # and in this other Python, which has Gymnasium

The environments step at the same time; a figure is the time of a step of all, divided by their number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import gymnasium
import numpy as np

from apex_jax.config.load import load
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.host.program import CONFIGS
from benchmarks.report import finish, medians, ratio, side_by_side, target

TASK, COUNT = "CartPole-v1", 16
PEER, OWN = "AsyncVectorEnv", "this Python"


def main() -> None:
    """Measures processes of this Python, and of those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", help="paths of other interpreters")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    peer = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make(TASK)] * COUNT)
    peer.reset(seed=1)
    calls: dict[str, Callable[[], object]] = {PEER: lambda: peer.step(peer.action_space.sample())}
    environments = []
    pythons = {OWN: ""} | {f"other Python {number}": path for number, path in enumerate(arguments.pythons, 1)}
    for name, python in pythons.items():
        settings = [f"environment.task=gymnasium:{TASK}", f"environment.python={python}"]
        config = load(CONFIGS / "cartpole.yaml", [*settings, "environment.own_processes=true"])
        environments.append(VectorEnvironment(config, describe(config), np.arange(COUNT), 10_000))
        calls[name] = stepping(environments[-1])
    times = side_by_side(calls, arguments.seconds, arguments.rounds)
    peer.close()
    for environment in environments:
        environment.close()
    figures = {f"{name}, us": 1e6 * seconds / COUNT for name, seconds in medians(times).items()}
    targets = {"of the time of AsyncVectorEnv": target(ratio(times[OWN], times[PEER]), at_most=1.1)}
    for name in calls.keys() - {PEER, OWN}:
        more = figures[f"{name}, us"] - figures[f"{OWN}, us"]
        targets[f"{name}: more, us"] = target(more, at_most=30.0)
    finish("processes", figures, targets)


def stepping(environment: VectorEnvironment) -> Callable[[], object]:
    """Returns a function that steps all environments with random actions."""
    rng = np.random.default_rng(1)
    waiting = [environment.receive()]

    def step() -> None:
        environment.send(rng.integers(0, 2, COUNT, np.int32), waiting[0].env_id)
        waiting[0] = environment.receive()

    return step


if __name__ == "__main__":
    main()
