"""One run of a peer, in the peer's own environment, as `benchmarks/race.py` starts it; imports nothing of this project.

Its directory looks like one of our runs to `python main.py plot`. The clock begins with the process, start-up and
compilation counted, and stands still while the peer is evaluated.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

GAMES = 20  # of an evaluation
PACKAGES = ("stable-baselines3", "sb3-contrib", "sbx-rl", "rejax", "torch", "jax", "gymnasium", "gymnax", "mujoco")


class Clock:
    """Writes evaluations, and the seconds of training before each: `seconds` excludes what evaluations took."""

    def __init__(self, directory: Path, began: float) -> None:
        self._path = directory / "metrics" / "evaluator.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._began, self._paused, self._stopped = began, 0.0, 0.0

    def seconds(self) -> float:
        """Returns the seconds of start-up and training so far."""
        return time.time() - self._began - self._paused

    def stop(self) -> None:
        """Begins an evaluation."""
        self._stopped = time.time()

    def write(self, step: int, mean_return: float) -> None:
        """Ends an evaluation, of the parameters after so many steps."""
        trained = self._stopped - self._began - self._paused
        line = {"time": self._began + trained, "seconds": trained, "step": step, "eval/episodic_return": mean_return}
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        self._paused += time.time() - self._stopped


def stable_baselines(arguments: argparse.Namespace, settings: dict[str, Any], clock: Clock) -> None:
    """Trains an algorithm of Stable-Baselines3, its contrib package, or sbx."""
    from stable_baselines3.common.callbacks import BaseCallback  # type: ignore[import-not-found]
    from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found]
    from stable_baselines3.common.evaluation import evaluate_policy  # type: ignore[import-not-found]

    module, name = arguments.peer.split(".")
    if module != "sbx":
        importlib.import_module("torch").set_num_threads(1)
    algorithm = getattr(importlib.import_module({"sb3": "stable_baselines3"}.get(module, module)), name)
    every = arguments.every["seconds"]
    steps, num_environments = settings.pop("steps", 1_000_000_000), settings.pop("n_envs", 1)
    if "net_arch" in settings:
        settings["policy_kwargs"] = {"net_arch": settings.pop("net_arch")}
    settings = {key: falling(value) for key, value in settings.items()}
    make = maker(arguments.task)
    played = make_vec_env(make, n_envs=num_environments, seed=arguments.seed)
    evaluated = make_vec_env(make, n_envs=GAMES, seed=1000 + arguments.seed)
    model = algorithm("MlpPolicy", played, seed=arguments.seed, **settings)

    def evaluate() -> None:
        clock.stop()
        mean, _ = evaluate_policy(model, evaluated, n_eval_episodes=GAMES)
        clock.write(model.num_timesteps, float(mean))

    class Evaluations(BaseCallback):  # type: ignore[misc]
        """Evaluates every few seconds of training, and ends it after the time given."""

        def __init__(self) -> None:
            super().__init__()
            self._next = 0.0

        def _on_step(self) -> bool:
            seconds = clock.seconds()
            if seconds >= self._next:
                evaluate()
                self._next = seconds + every
            return seconds < arguments.seconds

    model.learn(int(steps), Evaluations())
    evaluate()


def maker(task: str) -> Callable[[], Any]:
    """Returns a function that makes an environment: a name that Gymnasium knows, or my_file:MyEnv."""
    import gymnasium
    from gymnasium.wrappers import FlattenObservation

    if task.startswith("dm_control/"):
        importlib.import_module("shimmy")
        return lambda: FlattenObservation(gymnasium.make(task))
    module, _, name = task.removeprefix("gymnasium:").rpartition(":")
    if module and name not in gymnasium.registry:
        sys.path.insert(0, "")
        found = getattr(importlib.import_module(module), name, None)
        if found is not None:
            return lambda: gymnasium.wrappers.TimeLimit(found(), 100_000)
    return lambda: gymnasium.make(name)


def falling(value: Any) -> Any:
    """Returns "lin_X" of RL Zoo as the function of the remaining share of training that it means."""
    if not str(value).startswith("lin_"):
        return value
    start = float(value.removeprefix("lin_"))
    return lambda remaining: remaining * start


def rejax_algorithm(arguments: argparse.Namespace, settings: dict[str, Any], clock: Clock) -> None:
    """Trains an algorithm of rejax: one compiled program, evaluations included, which only a number of steps ends."""
    import jax
    import numpy as np
    import rejax  # type: ignore[import-not-found]
    from jax.experimental import io_callback

    settings |= {"total_timesteps": settings.pop("steps", 1_000_000), "eval_freq": arguments.every["steps"]}
    algorithm = rejax.get_algo(arguments.peer.split(".")[1]).create(env=arguments.task, **settings)
    evaluate = algorithm.eval_callback

    def stop(_: Any) -> Any:
        clock.stop()
        return np.int32(0)

    def timed(algo: Any, state: Any, rng: Any) -> Any:
        stopped = io_callback(stop, jax.ShapeDtypeStruct((), np.int32), state.global_step, ordered=True)
        lengths, returns = evaluate(algo, state, jax.random.fold_in(rng, stopped))  # so it begins after `stop`
        io_callback(
            lambda step, mean: clock.write(int(step), float(mean)),
            None,
            state.global_step,
            returns.mean(),
            ordered=True,
        )
        return lengths, returns

    jax.block_until_ready(jax.jit(algorithm.replace(eval_callback=timed).train)(jax.random.key(arguments.seed)))


def run() -> None:  # not `main`, as what a user starts
    """Trains for the time, or the number of steps, that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--peer", required=True, help="FAMILY.ALGORITHM")
    parser.add_argument("--task", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of training, start-up included")
    parser.add_argument("--every", type=json.loads, required=True, help='between evaluations: {"seconds": 5}, or steps')
    parser.add_argument("--settings", required=True, help="a JSON object")
    arguments = parser.parse_args()
    settings = json.loads(arguments.settings)
    began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + started_seconds()
    clock = Clock(arguments.directory, began)
    start = {
        "time": began,
        "task": arguments.task,
        "seed": arguments.seed,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:-1]]),
    }
    start |= {"python": sys.version.split()[0], "versions": versions(), "settings": settings}
    (arguments.directory / "starts.jsonl").write_text(json.dumps(start) + "\n")
    train = rejax_algorithm if arguments.peer.startswith("rejax.") else stable_baselines
    train(arguments, settings, clock)


def started_seconds() -> float:
    """Returns when this process was started, in seconds since the machine was."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def versions() -> dict[str, str]:
    """Returns the versions of PACKAGES that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    run()
