"""MinAtar's Breakout played by the actor's loop, policy included: written in JAX against the same game in Gymnasium.

Both play the network of configs/minatar.yaml in this process, without links: gymnax many steps a call
(`workers.actor`), the package minatar in the pool of Gymnasium's environments: the same number of environments, all
in this process, and `--processes` of them, each in a process of its own. They are measured in turns.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from apex_jax.agent.registry import make_algorithm
from apex_jax.agent.segments import SegmentBuilder, spread_first_slots
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.host.program import CONFIGS
from apex_jax.workers.actor import Rollouts
from benchmarks.report import finish, peer, say, target

GAMES = {
    "gymnax": ("environment.task=gymnax:Breakout-MinAtar",),
    "Gymnasium, in this process": (
        "environment.task=gymnasium:minatar.gym:BaseEnv",
        "environment.settings={game: breakout}",
        "environment.own_processes=false",
    ),
    "Gymnasium, a process each": (
        "environment.task=gymnasium:minatar.gym:BaseEnv",
        "environment.settings={game: breakout}",
        "environment.own_processes=true",
    ),
}


def main() -> None:
    """Measures each in turn; the target is of the faster of the two of Gymnasium."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=int, default=64)
    parser.add_argument("--processes", type=int, default=8, help="of Gymnasium's environments; each imports minatar")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    peer("minatar"), peer("gymnax")
    rates: dict[str, list[float]] = {name: [] for name in GAMES}
    for _, name in itertools.product(range(arguments.rounds), GAMES):
        size = arguments.processes if "own_processes=true" in GAMES[name][-1] else arguments.environments
        config = load(CONFIGS / "minatar.yaml", [*GAMES[name], f"actor.environments={size}"])
        rates[name].append(steps_per_second(config, arguments.seconds))
        say(f"{name}: {rates[name][-1]:,.0f} steps/s")
    figures = {name: float(np.median(each)) for name, each in rates.items()}
    of_gymnasium = max(rate for name, rate in figures.items() if name != "gymnax")
    ratio = target(figures["gymnax"] / of_gymnasium, at_least=20.0)
    finish("jax_environments", figures, {"times the faster of Gymnasium": ratio})


def steps_per_second(config: Config, seconds: float) -> float:
    """Returns the steps per second of all environments, segments built from them included."""
    spec, size = describe(config).spec, config.actor.environments
    algorithm = make_algorithm(config, spec)
    params = algorithm.acting_params(algorithm.init(jax.random.key(1)))
    exploration, seeds = algorithm.exploration(size), np.arange(size)
    builder = SegmentBuilder(spec, size, config.algorithm.discount, 0.0, False, spread_first_slots(spec, size))

    def compiled() -> Iterator[tuple[Any, Any]]:
        rollouts = Rollouts(config, algorithm, seeds, exploration, jax.random.key(2))
        started = rollouts.start(params)
        while True:
            following = rollouts.start(params)
            yield from rollouts.steps(started)
            started = following

    def stepped() -> Iterator[tuple[Any, Any]]:
        environment = VectorEnvironment(config, describe(config), seeds, 10_000, per_step=config.actor.batch_size)
        try:
            for call in itertools.count():
                step = environment.receive()
                output = algorithm.act(params, step.observation, exploration[step.env_id], jax.random.key(2), call)
                environment.send(np.asarray(output.action), step.env_id)
                yield step, output
        finally:
            environment.close()

    plays = compiled() if config.environment.is_jax else stepped()
    steps, started, warm = 0, time.monotonic(), False
    for step, output in plays:
        builder.add(step, *map(np.asarray, output))
        steps += step.env_id.size
        elapsed = time.monotonic() - started
        if not warm and elapsed > seconds / 4:
            warm, steps, started = True, 0, time.monotonic()
        elif warm and elapsed > seconds:
            plays.close()  # type: ignore[attr-defined]
            return steps / elapsed
    raise AssertionError


if __name__ == "__main__":
    main()
