"""The configuration that is chosen for a task: by its name, or by its observations and actions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apex_jax import training
from apex_jax.config.command_line import parse
from apex_jax.config.load import load
from apex_jax.environments import gymnasium_pool, gymnasium_tasks
from apex_jax.environments.environment import describe
from apex_jax.environments.preset import OF_KIND, OWN, preset_of
from apex_jax.host.errors import UsageError
from apex_jax.host.program import CONFIGS
from tests.rigs.processes import ROOT

ENVIRONMENTS = "gymnasium:tests.rigs.environments:"


@pytest.mark.parametrize(("task", "config"), [
    ("Breakout-v5", "atari_cpu"),
    ("WalkerWalk-v1", "walker"),
    ("gymnasium:CartPole-v1", "cartpole"),
    ("gymnax:Seaquest-MinAtar", "minatar"),
    ("Acrobot-v1", "lunar_lander"),
    ("CheetahRun-v1", "walker"),
    (f"{ENVIRONMENTS}Corridor", "lunar_lander"),
    (f"{ENVIRONMENTS}Pixels;environment.settings={{continuous: true, shape: [24, 30]}}", "car_racing"),
    (f"{ENVIRONMENTS}OwnSpaces", "lunar_lander"),
    ("gymnasium:MountainCarContinuous-v0", "walker"),
    ("gymnasium:examples.own_pixels:Grid", "pixels"),
])  # fmt: skip
def test_preset_is_that_of_the_task_or_of_its_spaces(task: str, config: str) -> None:
    command = parse(f"environment.task={task}".split(";"), preset_of)
    assert command.config.network == load(CONFIGS / f"{config}.yaml").network
    assert describe(command.config).spec.frame_shape
    assert f"--config {config}" in command.why or config == "atari_cpu"


@pytest.mark.parametrize(("side", "continuous"), [(7, False), (23, False), (23, True)])
def test_images_too_small_for_convolutions_are_read_as_numbers(side: int, continuous: bool) -> None:
    settings = f"environment.settings={{shape: [{side}, {side}, 3], continuous: {continuous}}}"
    command = parse([f"environment.task={ENVIRONMENTS}Pixels", settings], preset_of)
    assert f"{side} x {side} x 3 numbers" in command.why
    assert command.config.environment.observation_layout == "vector"
    assert describe(command.config).spec.frame_dtype == "float32"


def test_replay_of_large_images_holds_fewer() -> None:
    task = f"environment.task={ENVIRONMENTS}Pixels"
    command = parse([task, "environment.settings={shape: [240, 320, 3]}"], preset_of)
    assert command.config.replay.capacity_transitions == 2**32 // (240 * 320 * 3)
    assert "learning is slow" in command.why


def test_preset_of_a_kind_has_many_processes() -> None:
    assert parse(["environment.task=Acrobot-v1"], preset_of).config.processes == "many"
    assert parse(["environment.task=LunarLander-v3"], preset_of).config.processes == "one"


def test_preset_of_a_kind_has_a_quarter_of_an_hour_unless_a_limit_is_given() -> None:
    def limits(*given: str) -> tuple[float, int, float]:
        config = parse(["environment.task=Acrobot-v1", *given], preset_of).config
        return config.total_minutes, config.total_updates, config.evaluator.stop_at_return

    assert limits() == (15.0, 0, 0.0)
    assert limits("total_updates=77") == (0.0, 77, 0.0)
    assert limits("total_minutes=0") == (0.0, 0, 0.0)
    assert limits("evaluator.stop_at_return=5") == (15.0, 0, 5.0), "which may never come"


def test_settings_of_the_user_count_more_than_those_of_the_preset() -> None:
    config = parse(["environment.task=Acrobot-v1", "learner.batch_size=7", "seed=5"], preset_of).config
    assert (config.learner.batch_size, config.seed) == (7, 5)
    assert config.network == load(CONFIGS / "lunar_lander.yaml").network


def test_configuration_that_is_named_is_used_as_it_is_and_one_that_cannot_work_is_an_error_with_the_fix() -> None:
    command = parse(["--config", "cartpole", "environment.task=Acrobot-v1"], preset_of)
    assert (command.why, command.config.total_updates) == ("", load(CONFIGS / "cartpole.yaml").total_updates)
    config = parse(["--config", "atari", f"environment.task={ENVIRONMENTS}Corridor"], preset_of).config
    with pytest.raises(UsageError, match="or leave them and --config out"):
        describe(config)


def test_board_with_action_masks_is_read_as_numbers() -> None:
    command = parse([f"environment.task={ENVIRONMENTS}MaskedBoard"], preset_of)
    assert describe(command.config).spec.action.is_masked
    assert "observations are 7 x 7 x 3 numbers, actions 2 choices" in command.why


@pytest.mark.parametrize(("task", "words"), [
    ("Pong", "did you mean Pong-v5"), ("gymnasium:NoSuch-v0", "NoSuch"), ("foo:bar", "must be gymnasium:ID"),
])  # fmt: skip
def test_task_that_does_not_exist_is_wrong_usage(task: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse([f"environment.task={task}"], preset_of)


def test_environment_is_made_once_for_choice_and_description(monkeypatch: pytest.MonkeyPatch) -> None:
    made, look = list[object](), gymnasium_tasks.look

    def counted(*given: Any) -> Any:
        made.append(given)
        return look(*given)

    monkeypatch.setattr(gymnasium_pool, "look", counted)
    config = parse([f"environment.task={ENVIRONMENTS}Corridor"], preset_of).config
    describe(config, is_tried=True)
    assert len(made) == 1
    describe(config, is_tried=True)  # of a later run, whose files may have changed
    assert len(made) == 2
    for count in (3, 4):  # of runs that ended before they described it
        parse([f"environment.task={ENVIRONMENTS}Corridor"], preset_of)
        assert len(made) == count


def test_train_takes_a_task_in_place_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small: dict[str, Any] = {"replay": {"min_size_to_sample": 640}, "learner": {"batch_size": 32}}
    games = {"episodes": 2, "max_episode_frames": 50}
    directory = str(tmp_path / "run")
    run = training.train(f"{ENVIRONMENTS}Corridor", run_directory=directory, total_updates=40, evaluator=games, **small)
    assert run.config.environment.task == f"{ENVIRONMENTS}Corridor"
    assert "so --config lunar_lander" in capsys.readouterr().out
    with pytest.raises(UsageError, match="phys2d/CartPole-v1 is given, too"):
        training.train("phys2d/CartPole-v1", environment={"task": "Acrobot-v1"})


def test_each_preset_is_a_configuration() -> None:
    assert {*OWN.values(), *OF_KIND.values()} <= {path.stem for path in CONFIGS.glob("*.yaml")}


def test_installed_program_without_arguments_prints_three_commands_to_try() -> None:
    code = "import sys; sys.argv[0] = 'apex-jax'; from apex_jax.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n  apex-jax ") == 3
