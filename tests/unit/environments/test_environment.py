"""EnvPool as it is, and what `VectorEnvironment` makes of it: episodes, lives, limits, and refused actions."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import envpool
import numpy as np
import pytest

from apex_jax.config import ActorConfig, Config, EnvironmentConfig
from apex_jax.config.load import load
from apex_jax.environments.environment import (
    Episode,
    EpisodeTracker,
    VectorEnvironment,
    can_render,
    describe,
    has_reference_simulator,
)
from apex_jax.host.errors import UsageError
from apex_jax.types import Step, named_parts
from tests.rigs.recordings import PONG


def config(task: str, **environment: Any) -> Config:
    frames: dict[str, Any] = {} if task.endswith("-v5") else {"frame_stack": 1, "frame_skip": 1}
    return Config(environment=EnvironmentConfig(task=task, **(frames | environment)))


def play(task: str, steps: int, seeds: list[int], max_episode_frames: int = 50_000, **environment: Any) -> list[Step]:
    """Returns what an environment of 42 x 42 pixels (if any) returned under random actions, the same for each call."""
    settings = config(task, frame_size=42, **environment)
    environment_spec, rng = describe(settings), np.random.default_rng(0)
    pool = VectorEnvironment(settings, environment_spec, np.array(seeds), max_episode_frames)
    returned = []
    for _ in range(steps):
        returned.append(pool.receive())
        pool.send(
            rng.integers(0, environment_spec.spec.action.num_actions, len(seeds), dtype=np.int32), returned[-1].env_id
        )
    pool.close()
    return returned


def by_environment(steps: list[Step]) -> list[list[Step]]:
    """Returns each environment's own steps, without the axis A."""
    rows: dict[int, list[Step]] = {}
    for step in steps:
        for i, env_id in enumerate(step.env_id):
            rows.setdefault(int(env_id), []).append(Step(*(field[i] for field in step)))
    return [rows[i] for i in sorted(rows)]


@pytest.fixture(scope="module")
def breakout() -> list[Step]:
    """Random Breakout: about 150 steps and five lives a game."""
    return play("Breakout-v5", 500, seeds=[1, 2, 3, 4])


@pytest.mark.parametrize(("task", "limit"), [("Breakout-v5", 50_000), ("Breakout-v5", 200), ("CartPole-v1", 50_000)])
def test_step_after_an_end_is_a_reset_without_reward_whose_episode_shares_no_frame(task: str, limit: int) -> None:
    ends = 0
    for history in by_environment(play(task, 400, seeds=[1, 2], max_episode_frames=limit)):
        assert history[0].first
        for before, now in itertools.pairwise(history):
            ended = bool(now.terminated or now.truncated)
            ends += ended
            assert now.first == (before.terminated or before.truncated)
            if now.first:
                assert now.reward == 0
                assert not any((now.terminated, now.truncated, now.life_lost))
            else:  # the stack rolls on by one frame, at an end too, and after a lost life
                np.testing.assert_array_equal(now.observation[:-1], before.observation[1:])
            assert not ended or not np.array_equal(now.observation[-1], history[0].observation[-1])
    assert ends >= 3


def test_game_over_terminates_and_the_time_limit_truncates(breakout: list[Step]) -> None:
    assert any(step.terminated.any() for step in breakout)
    assert not any(step.truncated.any() for step in breakout)  # far from the limit
    limited = by_environment(play("Pong-v5", 130, seeds=[1], max_episode_frames=200))[0]
    truncated = [i for i, step in enumerate(limited) if step.truncated]
    assert truncated == [50, 101]  # 200 frames are 50 steps, and the reset between two episodes is none
    assert not any(step.terminated or step.life_lost for step in limited)


def games(steps: list[Step]) -> list[tuple[int, list[Step]]]:
    """Returns every game that ended, with its environment."""
    found = []
    for env_id, history in enumerate(by_environment(steps)):
        begin = 0
        for i, step in enumerate(history):
            if step.terminated or step.truncated:
                found.append((env_id, history[begin : i + 1]))
                begin = i + 1
    return found


def test_episode_statistics_are_of_raw_rewards_in_full_games_across_lost_lives(breakout: list[Step]) -> None:
    pacman = play("MsPacman-v5", 250, seeds=[1, 2], max_episode_frames=480)
    assert {float(reward) for step in pacman for reward in step.reward} >= {0, 10}  # a pellet is 10, not clipped to 1
    for steps in (breakout, pacman):
        tracker = EpisodeTracker(4)
        episodes = [episode for step in steps for episode in tracker.add(step)]
        expected = [
            Episode(env_id, sum(float(step.reward) for step in game), steps=len(game) - 1)
            for env_id, game in games(steps)
        ]
        assert sorted(episodes) == sorted(expected)
        assert len(episodes) >= 4  # of each environment


def test_reset_to_fewer_lives_is_no_lost_life(monkeypatch: pytest.MonkeyPatch) -> None:
    class ScriptedPool:
        """Gains an extra life, runs into the time limit with it, and is reset."""

        observation_space = None
        lives = iter([3, 4, 4, 3, 2])
        truncated = iter([False, False, True, False, False])

        def async_reset(self) -> None:
            pass

        def recv(self) -> tuple[Any, ...]:
            pixels, nothing = np.zeros((1, 4, 84, 84), np.uint8), np.zeros(1, bool)
            info = {"env_id": np.zeros(1, np.int32), "lives": np.array([next(self.lives)], np.int32)}
            return pixels, np.zeros(1), nothing, np.array([next(self.truncated)]), info

    settings = config("Seaquest-v5")
    environment_spec = describe(settings)
    monkeypatch.setattr(envpool, "make", lambda *args, **options: ScriptedPool())
    pool = VectorEnvironment(settings, environment_spec, np.array([1]), 50_000)
    steps = [pool.receive() for _ in range(5)]
    assert [bool(step.first[0]) for step in steps] == [True, False, False, True, False]
    assert [bool(step.life_lost[0]) for step in steps] == [False, False, False, False, True]


def test_reset_starts_new_episodes_also_in_mid_game() -> None:
    settings = config("Pong-v5", frame_size=42)
    pong = VectorEnvironment(settings, describe(settings), np.array([1, 2]), 50_000)
    for _ in range(30):
        step = pong.receive()
        pong.send(np.array([2, 3], np.int32), step.env_id)
    assert not pong.receive().first.any()
    pong.reset()
    step = pong.receive()
    assert step.first.all()
    assert (step.observation == step.observation[:, :1]).all()  # an initial stack repeats one frame
    np.testing.assert_array_equal(step.reward, 0)
    pong.close()


@pytest.mark.parametrize(("task", "has_simulator"), [
    ("WalkerWalk-v1", True), ("HalfCheetah-v4", True), ("myoElbowPose1D6MRandom-v0", False), ("Go1Getup-v1", False),
])  # fmt: skip
def test_task_of_mujoco_is_rendered_only_by_its_reference_simulator(task: str, has_simulator: bool) -> None:
    assert not can_render(config(task), describe(config(task)))
    assert has_reference_simulator(config(task)) == has_simulator


def test_segment_that_no_message_can_hold_is_refused() -> None:
    pong = config("Pong-v5")
    pong = pong.replace(environment=replace(pong.environment, frame_size=210))
    with pytest.raises(UsageError, match=r"actor\.segment_slots=758: must be at most 757, with .*task=Pong-v5"):
        describe(pong.replace(actor=ActorConfig(segment_slots=758)))
    assert describe(pong.replace(actor=ActorConfig(segment_slots=757))).spec.slots == 757


def test_equal_seeds_agree_and_different_seeds_differ() -> None:
    def observations(seeds: list[int]) -> np.ndarray:
        return np.stack(
            [np.stack([step.observation for step in row]) for row in by_environment(play("CartPole-v1", 60, seeds))]
        )

    first = observations([3, 3 + 10**6])
    np.testing.assert_array_equal(first, observations([3, 3 + 10**6]))
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first, observations([4, 4 + 10**6]))


@pytest.mark.long
def test_sticky_actions_and_how_episodes_start_reach_the_emulator() -> None:
    for task, change in (
        ("Seaquest-v5", {"repeat_action_probability": 0.9}),
        ("Seaquest-v5", {"noop_max": 1}),
        ("Breakout-v5", {"fire_reset": False}),
    ):
        plain, changed = play(task, 30, seeds=[1]), play(task, 30, seeds=[1], **change)
        pairs = zip(plain, changed, strict=True)
        assert any(not np.array_equal(before.observation, after.observation) for before, after in pairs), change


def test_screen_shows_the_newest_step() -> None:
    config = load(None, PONG)
    environment_spec = describe(config)
    environment = VectorEnvironment(config, environment_spec, np.arange(1), 10_000, rendered=True)
    step = environment.receive()
    differs = 0
    for _ in range(60):
        before = environment.render()
        environment.send(np.zeros(1, np.int32), step.env_id)
        step, after = environment.receive(), environment.render()
        assert before is not None
        assert after is not None
        small_differs = (step.observation[0, -1] != step.observation[0, -2]).any()
        assert small_differs <= (before != after).any()
        differs += int(small_differs)
    environment.close()
    assert differs > 20


def steps_of(task: str, frame_stack: int) -> list[Step]:
    """Returns 40 steps of three environments, two at a time, whose actions are the same for each `frame_stack`."""
    plain = ["environment.frame_skip=1", "actor.segment_slots=64", "environment.own_processes=false"]
    small = ["network.channels=[4]", "network.kernel_sizes=[3]", "network.strides=[1]"]
    settings = load(None, [f"environment.task={task}", f"environment.frame_stack={frame_stack}", *plain, *small])
    described, rng, steps = describe(settings), np.random.default_rng(0), list[Step]()
    with contextlib.closing(VectorEnvironment(settings, described, np.arange(3), 9, threads=1, per_step=0)) as pool:
        for _ in range(40):
            steps.append(pool.receive())
            valid = named_parts(steps[-1].observation).get("mask", np.ones((3, 1, described.spec.action.num_actions)))
            actions = (rng.random((3, 1)) + valid[:, 0].cumsum(axis=1) / valid[:, 0].sum(axis=1)[:, None] >= 1).argmax(
                axis=1
            )
            pool.send(actions.astype(np.int32), steps[-1].env_id)
    return steps


@pytest.mark.parametrize("task", [
    "CartPole-v1",
    "gymnasium:examples.picture_and_numbers:Errand",
    "gymnasium:tests.rigs.environments:MaskedBoard",
    "jax:tests.rigs.jax_environments:Several",
])  # fmt: skip
def test_stacks_are_the_newest_frames_and_vectors_of_the_episode_and_begin_with_its_first(task: str) -> None:
    stack, history = 3, dict[tuple[str, int], list[np.ndarray]]()
    for alone, stacked in zip(steps_of(task, 1), steps_of(task, stack), strict=True):
        for name, part in named_parts(alone.observation).items():
            for row, env_id in enumerate(alone.env_id.tolist()):
                if alone.first[row]:
                    history[name, env_id] = [part[row, 0]] * stack
                history[name, env_id].append(part[row, 0])
                newest = history[name, env_id][-1:] if name == "mask" else history[name, env_id][-stack:]
                np.testing.assert_array_equal(named_parts(stacked.observation)[name][row], newest)
        for field in ("env_id", "reward", "first", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(alone, field), getattr(stacked, field))
