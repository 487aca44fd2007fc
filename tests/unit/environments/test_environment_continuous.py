"""Tasks of MuJoCo: parts of observations become one vector, actions are scaled and checked, rewards of resets are 0."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import envpool
import numpy as np
import pytest

from apex_jax.config import Config, EnvironmentConfig
from apex_jax.environments.environment import Episode, EpisodeTracker, VectorEnvironment, describe
from apex_jax.types import ActionSpec, Step

LEG = ([-1, -1, -0.8], [1, 1.1, 0.8])  # of the quadruped: yaw, lift, extend
# Parts of observations, by size, and actions: not EnvPool's, but those of `dm_control.suite` (1.0.38).
DM_CONTROL: dict[str, tuple[dict[str, int], int]] = {
    "LqrLqr21-v1": ({"position": 2, "velocity": 2}, 1),
    "FishSwim-v1": ({"joint_angles": 7, "upright": 1, "velocity": 13, "target": 3}, 5),  # there: target, velocity
    "QuadrupedWalk-v1": (
        {"egocentric_state": 44, "torso_velocity": 3, "torso_upright": 1, "imu": 6, "force_torque": 24},
        12,
    ),
    "WalkerWalk-v1": ({"orientations": 14, "height": 1, "velocity": 9}, 6),
}


class Exchanged(NamedTuple):
    """What is sent to the pools of EnvPool that a test makes, and what they return."""

    actions: list[np.ndarray]
    results: list[Any]


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> Exchanged:
    make, exchanged = envpool.make, Exchanged([], [])

    def make_recorded(*args: Any, **options: Any) -> Any:
        pool = make(*args, **options)
        send, receive = pool.send, pool.recv

        def recorded_send(action: np.ndarray, env_id: np.ndarray) -> None:
            exchanged.actions.append(action.copy())
            send(action, env_id)

        def recorded_receive() -> Any:
            exchanged.results.append(receive())
            return exchanged.results[-1]

        pool.send, pool.recv = recorded_send, recorded_receive
        return pool

    monkeypatch.setattr(envpool, "make", make_recorded)
    return exchanged


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
    task: str, low: list[float], high: list[float], exchanged: Exchanged
) -> None:
    settings, size = config_of(task), len(low)
    environment = VectorEnvironment(settings, describe(settings), np.array([1, 2]), 1_000)
    own = np.random.default_rng(0).uniform(-1, 1, (2, size)).astype(np.float32)
    for action in (-np.ones((2, size), np.float32), np.ones((2, size), np.float32), np.zeros((2, size)), own):
        environment.send(action, environment.receive().env_id)
    environment.close()
    lowest, highest, middle, between = exchanged.actions
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
    environment = VectorEnvironment(settings, describe(settings), np.array([1, 2]), 10_000)
    yield environment
    environment.close()


def with_element(value: float) -> np.ndarray:
    """Returns actions of two walkers of which one element is `value`."""
    action = np.zeros((2, 6), np.float32)
    action[1, 3] = value
    return action


@pytest.mark.parametrize("action", [
    *(with_element(value) for value in (math.nan, math.inf, -math.inf, 1.01, -1.01)),
    *(np.zeros(shape, np.float32) for shape in ((2, 5), (2, 7), (1, 6), (3, 6), (2,), (12,), (2, 6, 1), (0, 6))),
], ids=lambda action: f"{action.shape} {action.flat[9] if action.shape == (2, 6) else ''}")  # fmt: skip
def test_action_that_is_no_number_in_the_range_or_has_another_shape_is_refused_and_the_pool_goes_on(
    walker: VectorEnvironment, action: np.ndarray
) -> None:
    step = walker.receive()
    with pytest.raises(ValueError, match=re.escape("one action in [-1, 1] is needed for each environment")):
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


@pytest.mark.parametrize("garbage", [-1e300, math.nan, -4.0])
def test_reward_of_a_reset_is_0_whatever_the_pool_returns_there(
    garbage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config_of("Pendulum-v1")
    environment_spec = describe(settings)
    monkeypatch.setattr(envpool, "make", lambda *args, **options: ScriptedPool(garbage))
    environment, tracker = VectorEnvironment(settings, environment_spec, np.array([1]), 1_000), EpisodeTracker(1)
    rewards, episodes = [], []
    for _ in range(8):
        step = environment.receive()
        rewards.append(float(step.reward[0]))
        episodes += tracker.add(step)
        environment.send(np.zeros((1, 1), np.float32), step.env_id)
    assert rewards == [0, -1, -2, -4] * 2
    assert episodes == [Episode(env_id=0, episode_return=-7.0, steps=3)] * 2


# Observations of several parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", DM_CONTROL)
def test_parts_sizes_and_actions_are_those_of_dm_control_in_the_order_of_envpool(task: str) -> None:
    sizes, actions = DM_CONTROL[task]
    parts = describe(config_of(task)).parts
    assert parts is not None
    assert [(*part.path, math.prod(part.shape)) for part in parts] == list(sizes.items())
    spec = describe(config_of(task)).spec
    assert (spec.frame_shape, spec.frame_dtype, spec.frame_stack) == ((sum(sizes.values()),), "float32", 1)
    assert spec.action == ActionSpec.continuous(actions)


@pytest.mark.parametrize("task", [*DM_CONTROL, "HalfCheetah-v4", "Ant-v5", "Pendulum-v1"])
def test_environment_returns_what_envpool_returns_flattened_by_a_naive_loop(task: str, exchanged: Exchanged) -> None:
    settings = config_of(task)
    environment_spec, rng = describe(settings), np.random.default_rng(0)
    spec = environment_spec.spec
    environment = VectorEnvironment(settings, environment_spec, np.array([1, 2]), max_episode_frames=1_000)
    steps: list[Step] = []
    for _ in range(20):
        steps.append(environment.receive())
        environment.send(rng.uniform(-1, 1, (2, *spec.action.shape)).astype(np.float32), steps[-1].env_id)
    environment.close()
    for step, (observation, *_) in zip(steps, exchanged.results, strict=True):
        assert step.observation.shape == (2, 1, *spec.frame_shape)
        assert step.observation.dtype == np.float32
        assert np.isfinite(step.observation).all()
        names = list(DM_CONTROL[task][0]) if task in DM_CONTROL else ["all"]
        parts = observation if task in DM_CONTROL else {"all": observation}
        rows = [[np.float32(number) for name in names for number in parts[name][row].flat] for row in range(2)]
        assert step.observation[:, 0].tolist() == rows
    assert len({row.tobytes() for step in steps for row in step.observation}) == 40  # both environments move
