"""The child process of a reference simulator: names of tasks, bounds of actions, and missing packages."""

from __future__ import annotations

import sys

import envpool
import numpy as np
import pytest

from apex_jax.environments import reference_simulator_process
from apex_jax.environments.reference_simulator_process import envpool_name, explained, scaled

SUITE = {  # DM control's tasks by domain
    "acrobot": "swingup swingup_sparse",
    "ball_in_cup": "catch",
    "cartpole": "balance balance_sparse swingup swingup_sparse two_poles three_poles",
    "cheetah": "run",
    "dog": "stand walk trot run fetch",
    "finger": "spin turn_easy turn_hard",
    "fish": "upright swim",
    "hopper": "stand hop",
    "humanoid": "stand walk run run_pure_state",
    "humanoid_CMU": "stand walk run",
    "lqr": "lqr_2_1 lqr_6_2",
    "manipulator": "bring_ball bring_peg insert_ball insert_peg",
    "pendulum": "swingup",
    "point_mass": "easy hard",
    "quadruped": "walk run escape fetch",
    "reacher": "easy hard",
    "stacker": "stack_2 stack_4",
    "swimmer": "swimmer6 swimmer15",
    "walker": "stand walk run",
}
TASKS = [(domain, task) for domain, tasks in SUITE.items() for task in tasks.split()]


def test_every_task_of_the_suite_is_one_of_envpools() -> None:
    names = {envpool_name(*names) for names in TASKS}
    assert len(names) == len(TASKS) == 51
    assert names <= set(envpool.list_all_envs())


@pytest.mark.parametrize(("action", "low", "high", "expected"), [
    (0.3, -1.0, 1.0, 0.3),
    (-1.0, -0.8, 1.1, -0.8),
    (1.0, -0.8, 1.1, 1.1),
    (0.0, -0.8, 1.1, 0.15),
    (0.5, -2.0, 2.0, 1.0),
    (1.5, -2.0, 2.0, 2.0),
    (-0.5, -1e10, 1e10, -0.5),
    (0.5, -np.inf, np.inf, 0.5),
])  # fmt: skip
def test_actions_are_scaled_to_the_bounds_of_each_dimension(
    action: float, low: float, high: float, expected: float
) -> None:
    result = scaled(np.array([action, 0.25]), np.array([low, -1.0]), np.array([high, 1.0]))
    assert result.tolist() == pytest.approx([expected, 0.25], abs=1e-15)


def missing(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {name!r}", name=name)


def wrapped(error: Exception) -> RuntimeError:
    result = RuntimeError("install `gymnasium[classic_control]`")
    result.__cause__ = error
    return result


@pytest.mark.parametrize(("error", "words"), [
    (missing("mujoco"), ["mujoco", "requirements-film.txt", "libegl1"]),
    (wrapped(missing("pygame")), ["pygame", "requirements-film.txt"]),
    (AttributeError("'NoneType' object has no attribute 'eglQueryString'"), ["EGL", "apt install libegl1"]),
    (AttributeError("Cannot initialize a EGL device display."), ["EGL", "apt install libegl1"]),
    (ImportError("`Pusher-v4` is only supported on `mujoco<3`\nfor ..."), ["only supported on `mujoco<3`"]),
])  # fmt: skip
def test_failure_is_one_line_with_the_packages_to_install(error: Exception, words: list[str]) -> None:
    line = explained(error)
    assert [word for word in words if word not in line] == []
    assert "\n" not in line


def test_fix_is_one_that_this_installation_and_this_python_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    assert "requirements-film.txt" in explained(missing("dm_control"))
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    assert explained(missing("dm_control")).endswith("use Python 3.12")
    monkeypatch.setattr(reference_simulator_process, "CHECKOUT", None)
    assert "pip install 'apex-jax[film]'" in explained(missing("mujoco"))
