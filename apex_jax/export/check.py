"""Compares an exported policy with the policy itself, on observations of its environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from apex_jax.agent.action_masks import INVALID
from apex_jax.agent.policy_function import observation_shape
from apex_jax.config import Config
from apex_jax.environments.environment import VectorEnvironment, segment_spec
from apex_jax.host.errors import RunError
from apex_jax.policy import Agent, Policy
from apex_jax.types import SegmentSpec

TOLERANCE = 1e-5  # relative to the largest value of the batch, or to 1 if all are smaller
ENVIRONMENTS, STEPS = 8, 8


def real_observations(config: Config) -> np.ndarray:
    """Returns 64 observations [64, F, *O] of the first steps of 8 episodes with random actions.

    Raises UsageError if EnvPool cannot make the environment.
    """
    spec, rng = segment_spec(config), np.random.default_rng(config.seed)
    seeds = rng.integers(2**31, size=ENVIRONMENTS)
    environment = VectorEnvironment(config, spec, seeds, config.environment.max_episode_frames)
    seen = []
    with contextlib.closing(environment):
        for _ in range(STEPS):
            step = environment.receive()
            seen.append(step.observation)
            size = (len(step.env_id), *spec.action.shape)
            discrete = spec.action.dtype == "int32"
            action = rng.integers(spec.action.num_actions, size=size) if discrete else rng.uniform(-1, 1, size)
            if spec.action.is_masked:
                mask = step.observation[:, -1, -spec.action.num_actions :]
                action = (mask * rng.random(mask.shape)).argmax(axis=-1)
            environment.send(action.astype(spec.action.dtype), step.env_id)
    return np.concatenate(seen)


def random_observations(spec: SegmentSpec) -> np.ndarray:
    """Returns 64 observations [64, F, *O] of random numbers, without an environment."""
    rng, shape = np.random.default_rng(0), (ENVIRONMENTS * STEPS, spec.frame_stack, *spec.frame_shape)
    if spec.frame_dtype == "uint8":
        return rng.integers(256, size=shape, dtype=np.uint8)
    vectors = rng.normal(size=shape).astype(np.float32)
    if spec.action.is_masked:
        mask = vectors[..., -spec.action.num_actions :]
        mask[...] = mask >= np.minimum(mask.max(axis=-1, keepdims=True), 0)
    return vectors


def expected_outputs(agent: Agent, stacks: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the actions and values of the policy itself for observations [N, F, *O]."""
    assert agent.algorithm.greedy is not None
    observations = stacks.reshape(len(stacks), *observation_shape(agent.environment_spec))
    of_frames = agent.environment_spec._replace(image=None)  # the exported programs take frames, too
    action, _ = Policy(agent.algorithm, agent.params, of_frames).act(observations)
    outputs = agent.algorithm.greedy(agent.params, jnp.asarray(stacks))
    return {name: np.asarray(output) for name, output in outputs.items()} | {"action": action}


def check_outputs(
    file: str,
    outputs: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    numbered: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> None:
    """Raises RunError if the outputs of an exported file differ from those of the policy by more than TOLERANCE.

    `numbered`: that of the `EnvironmentSpec`.
    """
    for name, wanted in expected.items():
        found = outputs.get(name)
        if found is None or found.shape != wanted.shape:
            raise RunError(
                f"{file} has no output {name} of shape {wanted.shape}: please report this; nothing is written"
            )
        if name == "action" and "q_values" in expected:  # of two actions with one value, either is right
            found, wanted = (_chosen(expected["q_values"], numbered(actions)) for actions in (found, wanted))
        is_valid = wanted > INVALID / 2  # next to the values of invalid actions, every difference would be small
        found, wanted = found[is_valid], wanted[is_valid]
        difference = float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()))
        if not difference <= TOLERANCE:  # true for NaN, too
            what = f"{file} differs from the policy: {name} by {difference:.1e}, where {TOLERANCE:g} is allowed"
            raise RunError(f"{what}; please report this; nothing is written")


def _chosen(q_values: np.ndarray, actions: np.ndarray) -> np.ndarray:
    return np.take_along_axis(q_values, actions[:, None].astype(np.int64), axis=1)
