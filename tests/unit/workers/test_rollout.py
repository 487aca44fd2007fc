"""Compiled play of JAX environments against a slow twin that steps one environment at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent.registry import make_algorithm
from apex_jax.agent.segments import SegmentBuilder, spread_first_slots
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.environments.task import BrokenEnvironment
from apex_jax.types import Segment, Step
from apex_jax.workers.actor import STEPS_OF_A_CALL, Rollouts
from tests.rigs import jax_environments

LIMIT, CALLS = 16, 2
SETTINGS = (
    *("environment.frame_stack=1", "environment.frame_skip=1", f"environment.max_episode_frames={LIMIT}"),
    *("actor.segment_slots=16", "algorithm.n_step=3", "network.hidden_units=8", "metrics.info=[time]"),
    *("network.policy_units=[8]", "network.critic_units=[8]"),
)
IMAGE = (
    *("environment.observation_layout=HWC", "network.channels=[4]", "network.kernel_sizes=[3]", "network.strides=[1]"),
)


def learner_of(name: str) -> tuple[Any, Any, Any]:
    """Returns the configuration of an environment of the rig, its algorithm, and that one's first parameters."""
    image = IMAGE if name in ("Drawn", "Levels") else ()
    config = load(None, [f"environment.task=jax:tests.rigs.jax_environments:{name}", *SETTINGS, *image])
    algorithm = make_algorithm(config, describe(config).spec)
    return config, algorithm, algorithm.acting_params(algorithm.init(jax.random.key(1)))


class Twin:
    """One environment, stepped by the user's own functions."""

    def __init__(self, environment: Any, seed: int) -> None:
        self.reset, self.advance = jax.jit(environment.reset), jax.jit(environment.step)
        self.key, self.calls = jax.random.key(seed), 0
        self.restart()

    def next_key(self) -> jax.Array:
        self.calls += 1
        return jax.random.fold_in(self.key, self.calls - 1)

    def restart(self) -> None:
        self.observation, self.state = self.reset(self.next_key())
        self.reward, self.first, self.terminated, self.truncated, self.steps = 0.0, True, False, False, 0
        self.time = np.nan

    def step(self, action: Any) -> None:
        if self.terminated or self.truncated:
            return self.restart()
        result = self.advance(self.next_key(), self.state, action)
        self.observation, self.state, self.reward, terminated, truncated, info = result
        self.steps, self.first, self.time = self.steps + 1, False, float(info["time"])
        self.terminated = bool(terminated)
        self.truncated = not self.terminated and (bool(truncated) or self.steps >= LIMIT)
        return None


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", ["Sliding", *(pytest.param(name, marks=pytest.mark.long) for name in ("Corridor", "Drawn"))]
)
def test_segments_are_those_of_a_slow_twin_bit_for_bit(name: str) -> None:
    config, algorithm, params = learner_of(name)
    spec, seeds, key = describe(config).spec, np.array([3, 7, 11]), jax.random.key(5)
    exploration = np.array([0.1, 0.5, 0.9], np.float32)

    def builder() -> SegmentBuilder:
        return SegmentBuilder(spec, 3, config.algorithm.discount, 0.0, False, spread_first_slots(spec, 3))

    rollouts, built = Rollouts(config, algorithm, seeds, exploration, key), builder()
    segments: list[Segment] = []
    numbers = []
    for _ in range(CALLS):
        for step, output in rollouts.steps(rollouts.start(params)):
            numbers.append(step.info[:, 0])
            segments += built.add(step, *map(np.asarray, output))

    environment = getattr(jax_environments, name)()
    twins, slow = [Twin(environment, seed) for seed in seeds], builder()
    expected: list[Segment] = []
    scale = 255 if spec.frame_dtype == "uint8" else 1
    for call in range(CALLS * STEPS_OF_A_CALL):
        frames = [(np.asarray(twin.observation).astype(np.float32) * scale).astype(spec.frame_dtype) for twin in twins]
        ends = [[twin.first, twin.terminated, twin.truncated] for twin in twins]
        first, terminated, truncated = np.array(ends).T
        rewards, none = np.array([twin.reward for twin in twins], np.float32), np.zeros(3, bool)
        info = np.array([[twin.time] for twin in twins], np.float32)
        step = Step(
            np.arange(3, dtype=np.int32), np.array(frames)[:, None], rewards, first, terminated, truncated, none, info
        )
        np.testing.assert_array_equal(numbers[call], info[:, 0])
        output = algorithm.act(params, step.observation, exploration, key, call)
        expected += slow.add(step, *map(np.asarray, output))
        for twin, action in zip(twins, output.action, strict=True):
            twin.step(1.5 * action - 0.5 if name == "Sliding" else action - 1)

    assert len(segments) == len(expected) > 10
    for ours, theirs in zip(segments, expected, strict=True):
        np.testing.assert_array_equal(ours.frames, theirs.frames)
        for column in theirs.columns:
            np.testing.assert_array_equal(ours.columns[column], theirs.columns[column])


@pytest.mark.parametrize(("name", "said"), [
    ("Restarting", ["as if it reset itself"]),
    ("RestartingWithItsKey", ["as if it reset itself"]),
    ("Levels", ["numbers from 0 to 7, its observation_space 0 to 1"]),
    ("Corridor", []),
])  # fmt: skip
def test_step_that_resets_itself_and_levels_beyond_their_bounds_are_warnings_given_once(
    name: str, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config, algorithm, params = learner_of(name)
    rollouts = Rollouts(config, algorithm, np.array([3, 7]), jnp.ones(2), jax.random.key(1))
    ends = 0
    for _ in range(CALLS):
        ends += sum(bool(step.truncated.any()) for step, _ in rollouts.steps(rollouts.start(params)))
    assert ends > 1
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(said)
    assert all(text in line for text, line in zip(said, warnings, strict=True))


def test_observation_that_is_not_finite_ends_the_run_with_its_name() -> None:
    config, algorithm, params = learner_of("NotFinite")
    rollouts = Rollouts(config, algorithm, np.array([1]), jnp.ones(1), jax.random.key(1))
    with pytest.raises(BrokenEnvironment, match="NotFinite: it returned a reward or an observation that is not finite"):
        list(rollouts.steps(rollouts.start(params)))
