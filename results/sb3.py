"""Stable-Baselines3's DQN on the same game and machine, with the settings its authors publish for Atari (RL Zoo).

Writes a directory that `python main.py plot` reads. The clock stands still while its agent is evaluated, which ours
does beside training. Needs results/requirements-sb3.txt: `sb3/bin/python results/sb3.py --minutes 30 runs/sb3-1`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

FRAME_SKIP = 4
GAMES = 10
SETTINGS = {  # RL Zoo, hyperparams/dqn.yml, "atari"
    "buffer_size": 100_000,
    "learning_rate": 1e-4,
    "batch_size": 32,
    "learning_starts": 100_000,
    "target_update_interval": 1_000,
    "train_freq": 4,
    "gradient_steps": 1,
    "exploration_fraction": 0.1,
    "exploration_final_eps": 0.01,
    "optimize_memory_usage": False,
}
PACKAGES = ("stable-baselines3", "torch", "gymnasium", "ale-py", "numpy")
PLANNED_STEPS = 10_000_000  # the exploration schedule is a fraction of this


class Evaluations(BaseCallback):
    """Plays full games every few minutes of training, and ends it."""

    def __init__(self, environment: VecEnv, directory: Path, minutes: float, every_minutes: float):
        super().__init__()
        self._environment = environment
        self._path = directory / "metrics" / "evaluator.jsonl"
        self._seconds = 60 * minutes
        self._every = 60 * every_minutes
        self._next = 0.0
        self._start = time.time()
        self._paused = 0.0

    def _on_step(self) -> bool:
        trained = time.time() - self._start - self._paused
        if trained >= min(self._next, self._seconds):
            self._evaluate(trained)
            self._next += self._every
        return trained < self._seconds

    def _evaluate(self, trained: float) -> None:
        began = time.time()
        mean, _ = evaluate_policy(self.model, self._environment, n_eval_episodes=GAMES)
        self._paused += time.time() - began
        line = {
            "time": self._start + trained,
            "seconds": trained,
            "step": self.num_timesteps * FRAME_SKIP,
            "eval/episodic_return": float(mean),
            "charts/environment_frames_per_second": self.num_timesteps * FRAME_SKIP / max(trained, 1e-9),
            "charts/updates_per_second": self.model._n_updates / max(trained, 1e-9),  # type: ignore[attr-defined]
        }
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def main() -> None:
    """Trains for the time given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every-minutes", type=float, default=5.0, help="between evaluations (5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--game", default="Pong")
    arguments = parser.parse_args()
    (arguments.directory / "metrics").mkdir(parents=True)
    gymnasium.register_envs(ale_py)
    name = f"{arguments.game}NoFrameskip-v4"
    whole_games = {"terminal_on_life_loss": False, "clip_reward": False}
    played = VecFrameStack(make_atari_env(name, seed=arguments.seed), 4)
    evaluated = VecFrameStack(
        make_atari_env(name, n_envs=GAMES, seed=1000 + arguments.seed, wrapper_kwargs=whole_games), 4
    )
    model = DQN("CnnPolicy", played, seed=arguments.seed, **SETTINGS)  # type: ignore[arg-type]
    (arguments.directory / "starts.jsonl").write_text(json.dumps(this_start(arguments.game, arguments.seed)) + "\n")
    model.learn(PLANNED_STEPS, Evaluations(evaluated, arguments.directory, arguments.minutes, arguments.every_minutes))


def this_start(game: str, seed: int) -> dict[str, Any]:
    """Returns the data to repeat the run, with the keys of starts.jsonl."""
    return {
        "time": time.time(),
        "task": f"{game}-v5",
        "seed": seed,
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "settings": SETTINGS,
    }


if __name__ == "__main__":
    main()
