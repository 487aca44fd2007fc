"""Tasks of EnvPool: which can be trained, and what the user reads about the others."""

from __future__ import annotations

from typing import Any

import envpool
import numpy as np
import pytest

from apex_jax.command_line import parse
from apex_jax.config import Config, EnvironmentConfig
from apex_jax.environments.environment import Environment, segment_spec
from apex_jax.environments.envpool_tasks import describe, family_of
from apex_jax.environments.tasks import CONFIGS, families, names, trainable
from apex_jax.host.errors import UsageError
from apex_jax.host.program import CONFIGS as FOLDER
from apex_jax.settings import load
from apex_jax.types import Part


def config(task: str, **environment: Any) -> Config:
    frames: dict[str, Any] = {} if task.endswith("-v5") else {"frame_stack": 1, "frame_skip": 1}
    return Config(environment=EnvironmentConfig(task=task, **(frames | environment)))


@pytest.mark.parametrize(("task", "family"), [
    ("Pong-v5", "atari"), ("CartPole-v1", "classic_control"), ("WalkerWalk-v1", "mujoco.dmc"),
])  # fmt: skip
def test_family_of_a_task_is_the_part_of_envpool_that_has_it(task: str, family: str) -> None:
    assert family_of(task) == family


def test_dict_of_a_task_is_described_by_its_parts_in_envpools_order() -> None:
    task = describe(config("WalkerWalk-v1"))
    assert (task.frame_shape, task.frame_dtype, task.action.shape) == ((24,), "float32", (6,))
    assert task.parts == (Part(("orientations",), (14,)), Part(("height",), ()), Part(("velocity",), (9,)))


@pytest.mark.parametrize(("task", "suggestion"), [
    ("Pong", "did you mean Pong-v5"),
    ("Breakoot-v5", "Breakout-v5"),
    ("ZzzZzz", "did you mean Pong-v5"),
    ("pong-v5", "did you mean Pong-v5\\?"),
    ("spaceinvaders", "did you mean SpaceInvaders-v5\\?"),
])  # fmt: skip
def test_unknown_task_is_refused_with_a_suggestion(task: str, suggestion: str) -> None:
    with pytest.raises(UsageError, match=f"environment.task={task}.*{suggestion}"):
        segment_spec(Config(environment=EnvironmentConfig(task=task)))


def test_actions_of_several_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match=r"JobShop-v0: no algorithm here has its actions.*such as WalkerWalk-v1"):
        segment_spec(config("JobShop-v0"))


@pytest.mark.parametrize("task", ["BinPack-v2", "AlohaHandOver-v1", "FrankaKitchen-v1"])
def test_observations_or_actions_that_are_not_plain_arrays_are_refused(task: str) -> None:
    with pytest.raises(UsageError, match=rf"environment\.task={task}: .*; choose "):
        segment_spec(config(task))


def test_continuous_task_under_the_settings_of_a_game_is_refused_with_the_configuration_to_use() -> None:
    with pytest.raises(UsageError, match=r"use --config walker environment\.task=CheetahRun-v1$"):
        segment_spec(config("CheetahRun-v1", frame_stack=4))


def test_pixels_of_another_kind_than_ataris_are_refused() -> None:
    with pytest.raises(UsageError, match=r"academy_corner-v1: this agent plays no pixel games but Atari's"):
        segment_spec(config("gfootball/academy_corner-v1"))


@pytest.mark.parametrize("frames", [{"frame_stack": 4}, {"frame_skip": 4}])
def test_frames_of_a_task_without_frames_cannot_be_stacked_or_skipped(frames: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"frame_stack=1 environment\.frame_skip=1"):
        segment_spec(config("CartPole-v1", **frames))


def test_game_for_several_players_is_refused() -> None:
    with pytest.raises(UsageError, match=r"task=Chess-v1: a game for several players; choose a task for one"):
        segment_spec(config("Chess-v1"))


@pytest.mark.parametrize("error", [ImportError("no procgen\nassets"), RuntimeError("no scenario")], ids=repr)
def test_task_whose_parts_are_not_installed_is_wrong_usage(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(envpool, "make_spec", fail)
    with pytest.raises(UsageError, match=r"environment\.task=Pong-v5: EnvPool cannot make it here \(no \w+\); choose"):
        segment_spec(load(None))


ONE_OF_EACH_KIND = ("Pong-v5", "WalkerWalk-v1", "HalfCheetah-v4", "CartPole-v1", "Pendulum-v1", "BabyAI-GoToObj-v0")


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_listed_task_starts_with_the_arguments_listed(name: str) -> None:
    (task,) = trainable([name])
    config = parse(task.arguments.split()).config
    assert config.environment.task == name
    spec = segment_spec(config)
    assert task.is_continuous == (spec.action.dtype == "float32")
    environment = Environment(config, spec, np.arange(2), 100)
    step = environment.receive()
    assert step.observation.shape == (2, spec.frame_stack, *spec.frame_shape)
    environment.close()


@pytest.mark.parametrize("name", ["Basic-v1", "BigfishEasy-v0", "TicTacToe-v1", "CarRacing-v3"])
def test_a_task_that_no_agent_here_can_play_is_left_out(name: str) -> None:
    assert not list(trainable([name]))


def test_search_finds_names_and_families_without_regard_to_case() -> None:
    assert {"WalkerWalk-v1", "Walker2d-v4"} <= set(names("wALKER"))
    assert names("toy_text") == sorted(names("toy_text"))
    assert "Taxi-v3" in names("toy_text")
    assert names("zorro") == []


def test_each_configuration_of_a_task_exists_and_fits_its_actions() -> None:
    for name, config in CONFIGS.items():
        assert segment_spec(load(FOLDER / f"{config}.yaml", [f"environment.task={name}"])).frame_shape


def test_families_count_every_task() -> None:
    assert families().total() == len(names(""))
    assert families()["mujoco.dmc"] == 51
