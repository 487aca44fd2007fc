"""Specification of the list of tasks: each that is listed can be trained, by the arguments that are listed."""

from __future__ import annotations

import numpy as np
import pytest

from apex_jax.command_line import parse
from apex_jax.environments.environment import Environment, segment_spec
from apex_jax.environments.tasks import CONFIGS, families, names, trainable
from apex_jax.host.program import CONFIGS as FOLDER
from apex_jax.settings import load

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
