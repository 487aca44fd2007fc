"""The command check: how an environment is read, and how fast it is, before anything is trained."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import numpy as np

from apex_jax.config import Config
from apex_jax.config.command_line import parse
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.environments.preset import preset_of
from apex_jax.host.output import columns
from apex_jax.host.program import NAME, Parser
from apex_jax.types import MASK, EnvironmentSpec, SegmentSpec, Step

SECONDS = 2.0  # of random steps


def run(arguments: Sequence[str]) -> int:
    """Prints how an environment is read, and its speed; writes nothing. Returns the exit code.

    `arguments`: after "check". Raises UsageError, and RunError if the environment fails.
    """
    options, settings = _parser().parse_known_args(list(arguments))
    named = ["--config", options.config] if options.config else []
    config = parse([*named, f"environment.task={options.task}", *settings], preset_of).config
    task = describe(config, is_tried=True)
    spec, speed = task.spec, _steps_per_second(config, task)
    seconds = config.replay.min_size_to_sample / speed
    is_discrete, own = spec.action.dtype == "int32", config.algorithm.name
    agent = own if own != "auto" else "dqn" if is_discrete else "dpg"
    stack = f", the newest {spec.frame_stack} stacked" if spec.frame_stack > 1 else ""
    beside = f" and float32 {[spec.numbers]}" if spec.numbers else ""
    rows = [
        ("task", config.environment.task),
        ("read as", task.reading or f"{spec.frame_dtype} {list(spec.frame_shape)}"),
        ("one step", f"{spec.frame_dtype} {list(spec.frame_shape)}{beside}{stack}"),
        ("actions", f"{spec.action.num_actions} choices" if is_discrete else f"{spec.action.shape[0]} numbers"),
        ("masks", "which of them are valid" if spec.action.is_masked else "none"),
        ("agent", agent),
        ("speed", f"{speed:,.0f} steps a second of {config.actor.environments} environments, with random actions"),
        ("learns", f"after {config.replay.min_size_to_sample:,} steps (replay.min_size_to_sample), {seconds:,.0f} s"),
        ("warning", task.caution),
    ]
    print("\n".join(columns([row for row in rows if row[1]])))
    return 0


def _steps_per_second(config: Config, task: EnvironmentSpec) -> float:
    """Returns the speed of the actor's environments without a policy."""
    rng, number = np.random.default_rng(config.seed), config.actor.environments
    environment = VectorEnvironment(config, task, np.arange(number), config.environment.max_episode_frames)
    with contextlib.closing(environment):
        steps, step = 0, environment.receive()
        started = time.monotonic()
        while time.monotonic() - started < SECONDS:
            environment.send(_random_actions(task.spec, step, rng), step.env_id)
            step = environment.receive()
            steps += len(step.env_id)
        return max(1, steps) / (time.monotonic() - started)


def _random_actions(spec: SegmentSpec, step: Step, rng: np.random.Generator) -> np.ndarray:
    count, action = len(step.env_id), spec.action
    if action.dtype != "int32":
        return rng.uniform(action.low, action.high, (count, *action.shape)).astype(np.float32)
    if not action.is_masked:
        return rng.integers(0, action.num_actions, count).astype(np.int32)
    valid = step.observation[MASK][:, -1]
    valid = np.where(valid.any(axis=1, keepdims=True), valid, 1)  # a game in JAX may end with no valid action
    return np.array([rng.choice(np.flatnonzero(row)) for row in valid], np.int32)


def _parser() -> Parser:
    parser = Parser(
        "check",
        description="Steps an environment as a run would, and prints how it is read; nothing is trained or written.",
        epilog=f"examples: {NAME} check gymnasium:my_file:MyEnv; {NAME} check Pong-v5 --config atari_cpu",
    )
    parser.add_argument("task", metavar="TASK", help="as for environment.task; more settings may follow")
    parser.add_argument("--config", metavar="FILE", help="as for training")
    return parser
