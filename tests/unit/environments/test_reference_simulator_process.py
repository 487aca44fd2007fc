"""The child's end of a film: names of tasks, bounds of actions, the frames that are drawn, and missing packages."""

from __future__ import annotations

import io
import json
import sys

import envpool
import numpy as np
import pytest

from apex_jax.environments import reference_simulator_process
from apex_jax.environments.reference_simulator import HEADER_BYTES, Header, record_type
from apex_jax.environments.reference_simulator_process import envpool_name, explained, play, scaled

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


class Counter:
    """A simulator whose observation counts its steps and whose screen shows how often it was drawn."""

    low, high = np.array([-2.0, 0.0]), np.array([2.0, 1.0])

    def __init__(self, steps: int, steps_per_second: float):
        self.steps_per_second = steps_per_second
        self.actions: list[list[float]] = []
        self.screens = 0
        self._steps = steps

    def reset(self) -> np.ndarray:
        return np.zeros(1, np.float32)

    def step(self, action: np.ndarray) -> reference_simulator_process.Step:
        self.actions.append(action.tolist())
        count = len(self.actions)
        return np.array([count], np.float32), float(count), count == self._steps

    def screen(self) -> np.ndarray:
        self.screens += 1
        return np.full((2, 4, 3), self.screens, np.uint8)


def played(simulator: Counter, actions: list[list[float]]) -> tuple[Header, np.ndarray]:
    """Returns what the child writes for these actions."""
    answers = io.BytesIO()
    play(simulator, simulator.reset(), io.BytesIO(np.array(actions, "<f4").tobytes()), answers)
    written = answers.getvalue()
    header = Header(**json.loads(written[:HEADER_BYTES]))
    return header, np.frombuffer(written[HEADER_BYTES:], record_type(header))


def test_episode_is_a_record_of_the_start_and_one_for_each_action() -> None:
    simulator = Counter(steps=3, steps_per_second=20)
    header, records = played(simulator, [[0, 0], [-1, -1], [1, 1], [1, 1]])
    assert header == Header(observation_size=1, action_size=2, height=2, width=4, frames_per_second=20)
    assert simulator.actions == [[0, 0.5], [-2, 0], [2, 1]]
    assert records["observation"].tolist() == [[0], [1], [2], [3]]
    assert records["reward"].tolist() == [0, 1, 2, 3]
    assert records["ended"].tolist() == [False, False, False, True]
    assert records["drawn"].all()
    assert records["screen"][:, 0, 0, 0].tolist() == [1, 2, 3, 4]


def test_fast_tasks_are_drawn_at_up_to_30_frames_a_second_and_at_their_end() -> None:
    simulator = Counter(steps=6, steps_per_second=100)
    header, records = played(simulator, [[0, 0]] * 6)
    assert header.frames_per_second == 25
    assert records["drawn"].tolist() == [True, False, False, False, True, False, True]
    assert simulator.screens == 3
    assert played(Counter(1, 30), [])[0].frames_per_second == 30


def test_episode_ends_with_the_actions() -> None:
    assert len(played(Counter(steps=9, steps_per_second=20), [[0, 0], [0, 0]])[1]) == 3


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
