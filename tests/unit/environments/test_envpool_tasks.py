"""Tasks of EnvPool: which can be trained, what the user reads about the others, and the scores of Atari's games."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import Any

import envpool
import numpy as np
import pytest

from apex_jax.config import Config, EnvironmentConfig
from apex_jax.config.command_line import parse
from apex_jax.config.load import load
from apex_jax.environments.atari_scores import ATARI_SCORES, human_normalized_score
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.environments.preset import OWN, preset_of
from apex_jax.environments.tasks import families, names, trainable
from apex_jax.host.errors import UsageError
from apex_jax.host.program import CONFIGS as FOLDER


def config(task: str, **environment: Any) -> Config:
    frames: dict[str, Any] = {} if task.endswith("-v5") else {"frame_stack": 1, "frame_skip": 1}
    return Config(environment=EnvironmentConfig(task=task, **(frames | environment)))


@pytest.mark.long
def test_matplotlib_of_the_user_is_left_alone_until_a_game_of_jumanji_is_made() -> None:
    code = (
        "import os, sys; import apex_jax.environments.tasks as tasks;"
        "assert not {'MPLBACKEND', 'MPLCONFIGDIR'} & os.environ.keys() and 'matplotlib' not in sys.modules;"
        "tasks.envpool.make_gymnasium('Snake-v1', num_envs=1)"
    )
    names = os.environ.keys() - {"MPLBACKEND", "MPLCONFIGDIR"}
    environment = {name: os.environ[name] for name in names}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("task", "frames", "words"), [
    ("Pong", {}, "did you mean Pong-v5"),
    ("Breakoot-v5", {}, "Breakout-v5"),
    ("spaceinvaders", {}, r"did you mean SpaceInvaders-v5\?"),
    ("JobShop-v0", {}, "actions.*such as WalkerWalk-v1"),  # of several kinds
    ("BinPack-v2", {}, "; choose "),  # neither observations nor actions that are plain arrays
    ("AlohaHandOver-v1", {}, "; choose "),
    ("gfootball/academy_corner-v1", {}, "pixel games but Atari's"),
    ("Chess-v1", {}, "several players"),
    ("CartPole-v1", {"frame_skip": 4}, r"environment\.frame_stack=1, or leave them and --config out"),
])  # fmt: skip
def test_task_that_cannot_be_trained_is_refused_with_what_to_choose(
    task: str, frames: dict[str, int], words: str
) -> None:
    with pytest.raises(UsageError, match=f"{task}.*{words}"):
        describe(config(task, **frames))


@pytest.mark.parametrize("error", [ImportError("no procgen\nassets"), RuntimeError("no scenario")], ids=repr)
def test_task_whose_parts_are_not_installed_is_wrong_usage(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(envpool, "make_spec", fail)
    with pytest.raises(UsageError, match=r"^environment\.task=Pong-v5: .*\(no \w+\)"):
        describe(load(None))


ONE_OF_EACH_KIND = ("Pong-v5", "WalkerWalk-v1", "HalfCheetah-v4", "CartPole-v1", "Pendulum-v1", "BabyAI-GoToObj-v0")


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_listed_task_starts_by_its_name(name: str) -> None:
    [(listed, of_list)] = trainable([name])
    config = parse([f"environment.task={name}"], preset_of).config
    assert config.environment.task == name
    environment_spec = describe(config)
    spec = environment_spec.spec
    assert (listed, of_list.action) == (name, spec.action)
    environment = VectorEnvironment(config, environment_spec, np.arange(2), 100)
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
    for name, config in OWN.items():
        assert ":" in name or describe(load(FOLDER / f"{config}.yaml", [f"environment.task={name}"])).spec.frame_shape


def test_families_count_every_task() -> None:
    assert families().total() == len(names(""))
    assert families()["mujoco.dmc"] == 51


# Scores ---------------------------------------------------------------------------------------------------------


def test_every_game_is_an_envpool_task() -> None:
    tasks = set(envpool.list_all_envs())
    assert [game for game in ATARI_SCORES if f"{game}-v5" not in tasks] == []


def test_table_reproduces_the_published_median_of_57_games() -> None:
    scores = [human_normalized_score(game, row.ape_x) for game, row in ATARI_SCORES.items()]
    assert len(scores) == 57
    assert statistics.median(score for score in scores if score is not None) == pytest.approx(4.34, abs=0.005)


@pytest.mark.parametrize(("episode_return", "score"), [(-20.7, 0.0), (14.6, 1.0), (20.9, 41.6 / 35.3)])
def test_random_play_is_0_and_the_human_tester_is_1(episode_return: float, score: float) -> None:
    assert human_normalized_score("Pong-v5", episode_return) == pytest.approx(score)
    assert human_normalized_score("Pong", episode_return) == pytest.approx(score)


@pytest.mark.parametrize("task", ["CartPole-v1", "Catch-v0", "Adventure-v5", ""])
def test_task_outside_the_57_games_has_no_normalized_score(task: str) -> None:
    assert human_normalized_score(task, 1.0) is None
