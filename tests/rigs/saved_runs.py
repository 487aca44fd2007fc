"""Run directories with checkpoints of untrained agents, as a learner leaves them."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from apex_jax.agent.registry import make_algorithm, resolved
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.run.checkpoint import Checkpointer, Progress
from apex_jax.run.environment_spec import record_environment_spec
from apex_jax.run.evaluations import Evaluation
from apex_jax.run.params_file import keep_if_best
from apex_jax.run.provenance import record_start, write_config
from apex_jax.transport.params_codec import architecture_of
from tests.rigs.runs import ROOT

RUNS = {
    "Catch-v0": ("catch",),
    "CartPole-v1": ("catch", "environment.task=CartPole-v1"),
    "Pong-v5": ("pong_cpu", "environment.frame_stack=3", "network.hidden_units=8"),
    "Pendulum-v1": ("pendulum",),
    "WalkerWalk-v1": ("walker",),
}


def config_of(task: str, directory: Path, *more: str) -> Config:
    name, *settings = RUNS[task]
    limits = ["evaluator.episodes=2", "evaluator.epsilon=0", "evaluator.max_episode_frames=200"]
    return load(ROOT / "configs" / f"{name}.yaml", [*settings, *limits, *more, f"run_directory={directory}"])


def save_run(task: str, directory: Path, updates: tuple[int, ...] = (1, 2), *settings: str) -> Config:
    """Writes a run directory with checkpoints of params that differ; returns its configuration."""
    config = config_of(task, directory, *settings)
    environment_spec = describe(config)
    spec = environment_spec.spec
    algorithm = make_algorithm(config, spec)
    directory.mkdir(parents=True, exist_ok=True)
    record_start(config)
    write_config(config, config.directory)
    record_environment_spec(directory, environment_spec)
    checkpointer = Checkpointer(str(directory))
    for count in updates:
        state = algorithm.init(jax.random.key(count))
        key, architecture = (
            resolved(config, spec).checkpoint_compatibility_key,
            architecture_of(algorithm.acting_params(state)),
        )
        checkpointer.save(state, Progress(count, 10 * count, 1.0, count, key, architecture))
    checkpointer.close()
    assert checkpointer.error is None
    return config


def save_best(config: Config, updates: int, mean_return: float = 1.0) -> None:
    """Writes the folder `best` of a run, with the params of `save_run`'s checkpoint of these updates."""
    environment_spec = describe(config)
    algorithm = make_algorithm(config, environment_spec.spec)
    params = algorithm.acting_params(algorithm.init(jax.random.key(updates)))
    evaluation = Evaluation(1e9, updates, 0.0, np.array([mean_return]), environment_steps=10 * updates)
    assert keep_if_best(config, environment_spec, evaluation, params, "dqn")
