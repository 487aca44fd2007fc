"""Stable-Baselines3 on the same task and machine, with the settings its authors publish (RL Zoo).

DQN on an Atari game, TD3 on a Gymnasium task of MuJoCo: `--task Pong-v5`, `--task HalfCheetah-v4`. Writes a directory
that `python main.py plot` reads. Its clock stands still during its evaluations; apex_jax evaluates while it trains.
Needs results/requirements-sb3.txt: `sb3/bin/python results/sb3.py --minutes 30 runs/sb3-1`.
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
import numpy as np
import torch
from stable_baselines3 import DQN, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

GAMES = 10
DQN_SETTINGS: dict[str, Any] = {  # RL Zoo, hyperparams/dqn.yml, "atari"
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
TD3_SETTINGS: dict[str, Any] = {  # RL Zoo, hyperparams/td3.yml, "HalfCheetah-v4"
    "learning_rate": 1e-3,
    "batch_size": 256,
    "learning_starts": 10_000,
    "train_freq": 1,
    "gradient_steps": 1,
    "policy_kwargs": {"net_arch": [400, 300]},
}
TD3_NOISE = 0.1  # standard deviation of the Gaussian noise, from the same file
PACKAGES = ("stable-baselines3", "torch", "gymnasium", "ale-py", "mujoco", "numpy")
PLANNED_STEPS = 10_000_000  # the exploration schedule is a fraction of this


class Evaluations(BaseCallback):
    """Plays full games every few minutes of training, and ends the training after the given time."""

    def __init__(self, environment: VecEnv, frame_skip: int, directory: Path, minutes: float, every_minutes: float):
        super().__init__()
        self._frame_skip = frame_skip
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
            "step": self.num_timesteps * self._frame_skip,
            "eval/episodic_return": float(mean),
            "charts/environment_frames_per_second": self.num_timesteps * self._frame_skip / max(trained, 1e-9),
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
    parser.add_argument("--threads", type=int, help="of PyTorch (one per core; TD3: 1, three times as fast on 2 cores)")
    parser.add_argument("--task", default="Pong-v5", help="as apex_jax names it (Pong-v5)")
    arguments = parser.parse_args()
    (arguments.directory / "metrics").mkdir(parents=True)
    atari = arguments.task not in gymnasium.registry  # "Pong-v5" is the name of EnvPool
    if threads := arguments.threads or (None if atari else 1):
        torch.set_num_threads(threads)
    model, evaluated = (atari_dqn if atari else mujoco_td3)(arguments.task, arguments.seed)
    settings = DQN_SETTINGS if atari else TD3_SETTINGS
    start = this_start(arguments.task, arguments.seed, settings)
    (arguments.directory / "starts.jsonl").write_text(json.dumps(start) + "\n")
    frame_skip = 4 if atari else 1
    limits = (arguments.directory, arguments.minutes, arguments.every_minutes)
    model.learn(PLANNED_STEPS, Evaluations(evaluated, frame_skip, *limits))


def atari_dqn(task: str, seed: int) -> tuple[OffPolicyAlgorithm, VecEnv]:
    """Returns DQN on a game, and games for evaluations."""
    gymnasium.register_envs(ale_py)
    name = f"{task.removesuffix('-v5')}NoFrameskip-v4"
    whole_games = {"terminal_on_life_loss": False, "clip_reward": False}
    played = VecFrameStack(make_atari_env(name, seed=seed), 4)
    evaluated = VecFrameStack(make_atari_env(name, n_envs=GAMES, seed=1000 + seed, wrapper_kwargs=whole_games), 4)
    return DQN("CnnPolicy", played, seed=seed, **DQN_SETTINGS), evaluated


def mujoco_td3(task: str, seed: int) -> tuple[OffPolicyAlgorithm, VecEnv]:
    """Returns TD3 on a task, and environments for evaluations, which are played without noise."""
    played, evaluated = make_vec_env(task, seed=seed), make_vec_env(task, n_envs=GAMES, seed=1000 + seed)
    actions = played.action_space.shape or (1,)
    noise = NormalActionNoise(np.zeros(actions), np.full(actions, TD3_NOISE))
    return TD3("MlpPolicy", played, seed=seed, action_noise=noise, **TD3_SETTINGS), evaluated


def this_start(task: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the data to repeat the run, with the keys of starts.jsonl."""
    return {
        "time": time.time(),
        "task": task,
        "seed": seed,
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "settings": settings,
    }


if __name__ == "__main__":
    main()
