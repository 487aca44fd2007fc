"""Tasks with continuous actions: scaled and checked actions, rewards of resets, time limits, float32 observations."""

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
from apex_jax.environments.environment import Environment, Episode, EpisodeTracker, segment_spec
from apex_jax.types import Step

LEG = ([-1, -1, -0.8], [1, 1.1, 0.8])  # of the quadruped: yaw, lift, extend


def config_of(task: str) -> Config:
    return Config(environment=EnvironmentConfig(task=task, frame_stack=1, frame_skip=1))


class Recorder:
    """An EnvPool that records what it is sent and what it returns."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.sent: list[np.ndarray] = []
        self.returned: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def send(self, action: np.ndarray, env_id: np.ndarray) -> None:
        self.sent.append(action.copy())
        self._pool.send(action, env_id)

    def recv(self) -> Any:
        self.returned.append(self._pool.recv())
        return self.returned[-1]


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """One recorder for each pool that the test makes."""
    made: list[Recorder] = []
    make = envpool.make

    def make_recorded(*args: Any, **options: Any) -> Recorder:
        made.append(Recorder(make(*args, **options)))
        return made[-1]

    monkeypatch.setattr(envpool, "make", make_recorded)
    return made


def play(task: str, steps: int, max_episode_frames: int = 10_000) -> list[Step]:
    """Returns what two environments returned under random actions, many of them at a bound."""
    settings, rng = config_of(task), np.random.default_rng(0)
    spec = segment_spec(settings)
    environment = Environment(settings, spec, np.array([1, 2]), max_episode_frames)
    returned = []
    for _ in range(steps):
        returned.append(environment.receive())
        action = np.clip(rng.normal(size=(2, *spec.action.shape)), -1, 1).astype(np.float32)
        environment.send(action, returned[-1].env_id)
    environment.close()
    return returned


# Actions --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "low", "high"), [
    ("WalkerWalk-v1", [-1] * 6, [1] * 6),
    ("Pendulum-v1", [-2], [2]),
    ("InvertedPendulum-v4", [-3], [3]),
    ("Humanoid-v4", [-0.4] * 17, [0.4] * 17),
    ("QuadrupedWalk-v1", LEG[0] * 4, LEG[1] * 4),
    ("LqrLqr62-v1", [-1, -1], [1, 1]),  # EnvPool says 1e10, which bounds nothing
])  # fmt: skip
def test_actions_reach_envpool_scaled_to_the_bounds_of_each_dimension(
    task: str, low: list[float], high: list[float], recorders: list[Recorder]
) -> None:
    settings, size = config_of(task), len(low)
    environment = Environment(settings, segment_spec(settings), np.array([1, 2]), 1_000)
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


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")  # gymnasium, about the twin's space
@pytest.mark.parametrize(("task", "torque"), [("Pendulum-v1", 2.0), ("InvertedPendulum-v4", 3.0)])
def test_pool_moves_as_envpool_itself_does_with_its_largest_action(task: str, torque: float) -> None:
    settings = config_of(task)
    environment = Environment(settings, segment_spec(settings), np.array([7]), 1_000)
    twin = envpool.make(task, env_type="gymnasium", num_envs=1, seed=[7])
    expected = [twin.reset()[0], *(twin.step(np.array([[torque]]))[0] for _ in range(5))]
    for observation in expected:
        step = environment.receive()
        np.testing.assert_array_equal(step.observation[0, 0], observation[0].astype(np.float32))
        environment.send(np.ones((1, 1), np.float32), step.env_id)
    environment.close()
    twin.close()


@pytest.fixture(scope="module")
def walker() -> Iterator[Environment]:
    settings = config_of("WalkerWalk-v1")
    environment = Environment(settings, segment_spec(settings), np.array([1, 2]), 10_000)
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
    walker: Environment, action: np.ndarray
) -> None:
    step = walker.receive()
    with pytest.raises(ValueError, match=re.escape("one action in [-1, 1] is needed for each environment in [0, 2)")):
        walker.send(action, step.env_id)
    walker.send(with_element(1.0), step.env_id)
    assert np.isfinite(walker.receive().observation).all()
    walker.send(with_element(-1.0), step.env_id)


# Rewards and observations ---------------------------------------------------------------------------------------------


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
    environment, tracker = Environment(settings, spec, np.array([1]), 1_000), EpisodeTracker(1)
    rewards, episodes = [], []
    for _ in range(8):
        step = environment.receive()
        rewards.append(float(step.reward[0]))
        episodes += tracker.add(step)
        environment.send(np.zeros((1, 1), np.float32), step.env_id)
    assert rewards == [0, -1, -2, -4] * 2
    assert episodes == [Episode(env_id=0, episode_return=-7.0, steps=3)] * 2


@pytest.mark.parametrize("task", ["WalkerWalk-v1", "HumanoidRun-v1"])
def test_rewards_are_envpools_but_0_at_every_reset_and_the_very_first(task: str, recorders: list[Recorder]) -> None:
    steps, resets = play(task, 60, max_episode_frames=9), 0
    for step, (_, raw_reward, *_) in zip(steps, recorders[0].returned, strict=True):
        np.testing.assert_array_equal(step.reward, [0 if f else r for f, r in zip(step.first, raw_reward, strict=True)])
        assert step.reward.dtype == np.float32
        assert ((step.reward >= 0) & (step.reward <= 1)).all()  # as all rewards of DM control
        resets += int(step.first.sum())
    assert steps[0].first.all()
    assert resets == 2 * 6


def test_float64_observations_become_float32(recorders: list[Recorder]) -> None:
    steps = play("HalfCheetah-v4", 20)
    for step, (observation, *_) in zip(steps, recorders[0].returned, strict=True):
        assert observation.dtype == np.float64
        assert step.observation.dtype == np.float32
        assert not np.array_equal(observation, observation.astype(np.float32))  # so that rounding matters
        np.testing.assert_array_equal(step.observation[:, 0], observation.astype(np.float32))


# Ends of episodes -----------------------------------------------------------------------------------------------------


class Returned(NamedTuple):
    """One result of one environment, as EnvPool returned it."""

    observation: np.ndarray
    reward: float
    ended: bool


def histories(recorder: Recorder) -> list[list[Returned]]:
    """Returns all that each of two environments returned, without the axis A."""
    found: list[list[Returned]] = [[], []]
    for observation, reward, terminated, truncated, info in recorder.returned:
        for row, env_id in enumerate(info["env_id"]):
            ended = bool(terminated[row] or truncated[row])
            found[env_id].append(Returned(observation[row].copy(), float(reward[row]), ended))
    return found


@pytest.fixture
def pendulum(recorders: list[Recorder]) -> tuple[list[Step], list[list[Returned]]]:
    """Two full episodes of 200 steps of two pendulums, as `Environment` and as EnvPool returned them."""
    steps = play("Pendulum-v1", 403)
    return steps, histories(recorders[0])


def test_episode_ends_at_the_time_limit_with_its_true_last_observation(
    pendulum: tuple[list[Step], list[list[Returned]]],
) -> None:
    steps, raw = pendulum
    assert [i for i, step in enumerate(steps) if step.truncated.all()] == [200, 401]  # a reset lies between
    assert not any(step.terminated.any() for step in steps)
    for before, now in itertools.pairwise(steps):
        np.testing.assert_array_equal(now.first, before.truncated)
        turned = np.abs(now.observation - before.observation)[:, 0, :2].max(axis=1)
        assert now.first.all() or (turned <= 0.4 + 1e-5).all()  # at most 8 radians a second, in 0.05 s
    for t, step in enumerate(steps):
        for row, env_id in enumerate(step.env_id):
            np.testing.assert_array_equal(step.observation[row, 0], raw[env_id][t].observation)
    for last, row in itertools.product((200, 401), range(2)):  # neither repeated, nor that of the reset
        own, *others = (steps[i].observation[row] for i in (last, last - 1, last + 1))
        assert not any(np.array_equal(own, other) for other in others)


def test_returns_of_episodes_are_the_raw_rewards_without_those_of_resets(
    pendulum: tuple[list[Step], list[list[Returned]]],
) -> None:
    steps, raw = pendulum
    tracker = EpisodeTracker(2)
    episodes = [episode for step in steps for episode in tracker.add(step)]
    expected = [
        Episode(env_id, sum(result.reward for result in raw[env_id][reset + 1 : last + 1]), steps=200)
        for env_id in range(2)
        for reset, last in ((0, 200), (201, 401))
    ]
    assert sorted(episodes) == sorted(expected)


def test_episode_of_a_hopper_that_fell_terminates_and_any_other_is_truncated(recorders: list[Recorder]) -> None:
    steps, fell = play("Hopper-v4", 120, max_episode_frames=25), 0
    age = np.zeros(2, int)
    for step, (_, _, terminated, truncated, _) in zip(steps, recorders[0].returned, strict=True):
        age = np.where(step.first, 0, age + 1)
        np.testing.assert_array_equal(step.terminated, terminated)
        np.testing.assert_array_equal(step.truncated, truncated)
        assert (step.truncated <= (age == 25)).all()
        assert ((step.terminated | step.truncated) >= (age == 25)).all()
        fell += int(step.terminated.sum())
    assert fell >= 1
