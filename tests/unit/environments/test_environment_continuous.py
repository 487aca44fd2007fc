"""Tasks with continuous actions: scaled and checked actions, rewards of resets, and time limits."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import envpool
import numpy as np
import pytest

from apex_jax.config import Config, EnvironmentConfig
from apex_jax.environments.environment import Episode, EpisodeTracker, VectorEnvironment, segment_spec
from apex_jax.types import Step
from tests.unit.environments.conftest import Recorder

LEG = ([-1, -1, -0.8], [1, 1.1, 0.8])  # of the quadruped: yaw, lift, extend


def config_of(task: str) -> Config:
    return Config(environment=EnvironmentConfig(task=task, frame_stack=1, frame_skip=1))


@pytest.mark.parametrize(("task", "low", "high"), [
    ("WalkerWalk-v1", [-1] * 6, [1] * 6),
    ("Pendulum-v1", [-2], [2]),
    ("InvertedPendulum-v4", [-3], [3]),
    ("Humanoid-v4", [-0.4] * 17, [0.4] * 17),
    ("QuadrupedWalk-v1", LEG[0] * 4, LEG[1] * 4),
    ("LqrLqr62-v1", [-1, -1], [1, 1]),  # EnvPool has 1e10, which bounds nothing
])  # fmt: skip
def test_actions_reach_envpool_scaled_to_the_bounds_of_each_dimension(
    task: str, low: list[float], high: list[float], recorders: list[Recorder]
) -> None:
    settings, size = config_of(task), len(low)
    environment = VectorEnvironment(settings, segment_spec(settings), np.array([1, 2]), 1_000)
    own = np.random.default_rng(0).uniform(-1, 1, (2, size)).astype(np.float32)
    for action in (-np.ones((2, size), np.float32), np.ones((2, size), np.float32), np.zeros((2, size)), own):
        environment.send(action, environment.receive().env_id)
    environment.close()
    lowest, highest, middle, between = recorders[0].sent
    np.testing.assert_allclose(lowest, [low] * 2, rtol=1e-6)
    np.testing.assert_allclose(highest, [high] * 2, rtol=1e-6)
    np.testing.assert_allclose(middle, [(np.array(low) + high) / 2] * 2, rtol=1e-6, atol=1e-12)
    for row, element in itertools.product(range(2), range(size)):
        share = (float(own[row, element]) + 1) / 2  # of the way from the lower bound to the upper
        expected = low[element] * (1 - share) + high[element] * share
        assert between[row, element] == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.fixture(scope="module")
def walker() -> Iterator[VectorEnvironment]:
    settings = config_of("WalkerWalk-v1")
    environment = VectorEnvironment(settings, segment_spec(settings), np.array([1, 2]), 10_000)
    yield environment
    environment.close()


def with_element(value: float) -> np.ndarray:
    """Returns actions of two walkers of which one element is `value`."""
    action = np.zeros((2, 6), np.float32)
    action[1, 3] = value
    return action


@pytest.mark.parametrize(
    "action",
    [
        *(with_element(value) for value in (math.nan, math.inf, -math.inf, 1.01, -1.01)),
        *(np.zeros(shape, np.float32) for shape in ((2, 5), (2, 7), (1, 6), (3, 6), (2,), (12,), (2, 6, 1), (0, 6))),
    ],
    ids=lambda action: f"{action.shape} {action.flat[9] if action.shape == (2, 6) else ''}",
)
def test_action_that_is_no_number_in_the_range_or_has_another_shape_is_refused_and_the_pool_goes_on(
    walker: VectorEnvironment, action: np.ndarray
) -> None:
    step = walker.receive()
    with pytest.raises(ValueError, match=re.escape("one action in [-1, 1] is needed for each environment in [0, 2)")):
        walker.send(action, step.env_id)
    walker.send(with_element(1.0), step.env_id)
    assert np.isfinite(walker.receive().observation).all()
    walker.send(with_element(-1.0), step.env_id)


class ScriptedPool:
    """One pendulum whose episodes have three steps; at each reset it returns garbage for a reward."""

    observation_space = None

    def __init__(self, garbage: float) -> None:
        self._returned = itertools.cycle([(garbage, False), (-1.0, False), (-2.0, False), (-4.0, True)])

    def async_reset(self) -> None:
        pass

    def send(self, action: np.ndarray, env_id: np.ndarray) -> None:
        pass

    def recv(self) -> tuple[Any, ...]:
        reward, truncated = next(self._returned)
        outcome = np.array([reward]), np.zeros(1, bool), np.array([truncated])
        return np.zeros((1, 3), np.float32), *outcome, {"env_id": np.zeros(1, np.int32)}


@pytest.mark.parametrize("garbage", [1e27, -1e300, math.nan, math.inf, -4.0])
def test_reward_of_a_reset_is_0_whatever_the_pool_returns_there(
    garbage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config_of("Pendulum-v1")
    spec = segment_spec(settings)
    monkeypatch.setattr(envpool, "make", lambda *args, **options: ScriptedPool(garbage))
    environment, tracker = VectorEnvironment(settings, spec, np.array([1]), 1_000), EpisodeTracker(1)
    rewards, episodes = [], []
    for _ in range(8):
        step = environment.receive()
        rewards.append(float(step.reward[0]))
        episodes += tracker.add(step)
        environment.send(np.zeros((1, 1), np.float32), step.env_id)
    assert rewards == [0, -1, -2, -4] * 2
    assert episodes == [Episode(env_id=0, episode_return=-7.0, steps=3)] * 2


def test_episode_ends_at_the_time_limit_with_its_true_last_observation() -> None:
    settings, steps = config_of("Pendulum-v1"), list[Step]()
    environment = VectorEnvironment(settings, segment_spec(settings), np.array([1, 2]), 10_000)
    for _ in range(403):
        steps.append(environment.receive())
        environment.send(np.ones((2, 1), np.float32), steps[-1].env_id)
    environment.close()
    assert [i for i, step in enumerate(steps) if step.truncated.all()] == [200, 401]  # a reset lies between
    assert not any(step.terminated.any() for step in steps)
    for before, now in itertools.pairwise(steps):
        np.testing.assert_array_equal(now.first, before.truncated)
        turned = np.abs(now.observation - before.observation)[:, 0, :2].max(axis=1)
        assert now.first.all() or (turned <= 0.4 + 1e-5).all()  # at most 8 radians a second, in 0.05 s
    for last, row in itertools.product((200, 401), range(2)):  # neither repeated, nor that of the reset
        own, *others = (steps[i].observation[row] for i in (last, last - 1, last + 1))
        assert not any(np.array_equal(own, other) for other in others)
