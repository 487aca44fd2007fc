"""Environments of Gymnasium in groups, in processes of their own or in the actor's."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments import processes
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.environments.gymnasium_tasks import NUMBER, Adapted, make
from apex_jax.environments.task import BrokenEnvironment
from apex_jax.types import Step
from tests.rigs.environments import processes_of
from tests.rigs.processes import wait_for_the_end_of

OWN = "gymnasium:tests.rigs.environments:"
PLACE = {
    "processes": "environment.own_processes=true",
    "one process": "environment.own_processes=false",
    "other Python": f"environment.python={sys.executable}",
}
PLACES = pytest.mark.parametrize("place", PLACE)
PROCESSES = pytest.mark.parametrize("place", ["processes", "other Python"])


def config(task: str, place: str, *overrides: str, stack: int = 1) -> Config:
    frames = (f"environment.frame_stack={stack}", "environment.frame_skip=1", "network.kernel_sizes=[8,4,1]")
    return load(None, [f"environment.task={task}", PLACE[place], *frames, *overrides])


def play(settings: Config, seeds: list[int], steps: int, per_step: int = 0, limit: int = 60) -> list[list[Step]]:
    """Returns each environment's steps, without the axis A, under actions that depend on nothing but their number."""
    environment_spec = describe(settings)
    spec = environment_spec.spec
    environment = VectorEnvironment(settings, environment_spec, np.array(seeds), limit, per_step=per_step)
    rows: list[list[Step]] = [[] for _ in seeds]
    try:
        while len(rows[-1]) < steps:
            step = environment.receive()
            for row, env_id in enumerate(step.env_id):
                rows[env_id].append(Step(*(field[row] for field in step)))
            actions = [action_of(spec.action.shape, len(rows[i]), i) for i in step.env_id]
            environment.send(np.array(actions, spec.action.dtype), step.env_id)
    finally:
        environment.close()
    return rows


def action_of(shape: tuple[int, ...], number: int, env_id: int) -> Any:
    rng = np.random.default_rng([number, env_id])
    return rng.uniform(-1, 1, shape).astype(np.float32) if shape else rng.integers(2)


def alone(settings: Config, seed: int, env_id: int, steps: int, limit: int = 60) -> list[tuple[Any, ...]]:
    """Plays the same by hand: observation, reward, first, terminated, truncated."""
    adapted = make(settings.environment.task, settings.environment.settings, limit)
    spec = describe(settings).spec
    rows: list[tuple[Any, ...]] = [(adapted.reset(seed=seed)[0], 0.0, True, False, False)]
    while len(rows) < steps:
        if rows[-1][3] or rows[-1][4]:
            rows.append((adapted.reset()[0], 0.0, True, False, False))
            continue
        action = action_of(spec.action.shape, len(rows), env_id)
        observation, reward, *ends, _ = adapted.step(2 * action if spec.action.shape else action)
        rows.append((observation, reward, False, *ends))
    return rows


@PLACES
@pytest.mark.parametrize("task", ["gymnasium:CartPole-v1", "gymnasium:Pendulum-v1", f"{OWN}Corridor"])
def test_steps_are_those_of_each_environment_played_alone(task: str, place: str) -> None:
    settings, seeds = config(task, place), [5, 6, 7]
    for env_id, steps in enumerate(play(settings, seeds, 100, per_step=2)):  # groups of two and of one
        expected = alone(settings, seeds[env_id], env_id, 100)
        for step, (observation, reward, *flags) in zip(steps, expected, strict=False):
            np.testing.assert_array_equal(step.observation[0], observation)
            assert step.reward == np.float32(reward)
            assert [step.first, step.terminated, step.truncated] == flags
        assert any(step.first for step in steps[1:])


def test_endless_episode_is_truncated_at_the_limit() -> None:
    [steps] = play(config(f"{OWN}Corridor", "one process", "environment.settings={length: 1000000}"), [1], 45, limit=20)
    assert [i for i, step in enumerate(steps) if step.truncated] == [20, 41]


@PLACES
def test_environments_that_draw_from_global_generators_differ_and_repeat_with_the_seed(place: str) -> None:
    settings = config(f"{OWN}Draws", place)
    draws = [np.array([step.observation[0] for step in steps]) for steps in play(settings, [1, 2, 3], 5)]
    for generator in range(3):
        assert len({environment[0, generator] for environment in draws}) == 3
        assert len({float(draw) for environment in draws for draw in environment[:, generator]}) == 15
    again = [np.array([step.observation[0] for step in steps]) for steps in play(settings, [1, 2, 3], 5)]
    np.testing.assert_array_equal(draws, again)


@PLACES
def test_environments_learn_numbers_that_differ_in_their_settings(place: str, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    numbers = f"environment.settings={{number: {NUMBER}, folder: work-{NUMBER}, closed: {closed}}}"
    rows = play(config(f"{OWN}Draws", place, numbers), [1, 2, 3], 2, per_step=2)
    found = {round(100 * float(row[0].observation[0][3])) for row in rows}
    assert len(found) == 3
    assert {f"{number} work-{number}" for number in found} <= set(closed.read_text().splitlines())


@PLACES
def test_pixels_are_stacked_and_the_first_frame_of_an_episode_fills_its_stack(place: str) -> None:
    settings = config(f"{OWN}Pixels", place, stack=3)
    for steps in play(settings, [1, 2], 40):
        stack: np.ndarray | None = None
        for step in steps:
            frame = step.observation[-1]
            stack = np.stack([frame] * 3) if step.first or stack is None else np.concatenate([stack[1:], frame[None]])
            np.testing.assert_array_equal(step.observation, stack)
        assert sum(step.first for step in steps) >= 2


@PLACES
def test_reset_starts_new_episodes_in_mid_game_and_left_out_environments_rest(place: str) -> None:
    settings = config(f"{OWN}Corridor", place)
    environment = VectorEnvironment(settings, describe(settings), np.array([1, 2]), 60, per_step=1)
    steps = [environment.receive(), environment.receive()]
    environment.leave_out(np.array([1]))
    environment.send(np.array([0], np.int32), np.array([0]))
    assert environment.receive().env_id.tolist() == [0]
    environment.reset()
    steps = [environment.receive(), environment.receive()]
    assert [step.env_id.tolist() for step in steps] == [[0], [1]]
    assert all(step.first.all() for step in steps)
    environment.close()


@PLACES
def test_screen_is_that_of_environment_0(place: str) -> None:
    settings = config(f"{OWN}Corridor", place)
    environment = VectorEnvironment(settings, describe(settings), np.array([1, 2]), 60, per_step=1, rendered=True)
    at = round(float(environment.receive().observation[0, 0, 1]) * 5)
    environment.receive()
    screen = environment.render()
    assert screen is not None
    assert screen.shape == (64, 96, 3)
    assert (screen == 10 * at).all()
    environment.close()


def reset_and_step(adapted: Adapted) -> None:
    adapted.reset(seed=0)
    adapted.step(0)


@pytest.mark.parametrize(("task", "what", "message"), [
    ("Old", "", "seed"),
    ("Mistaken", "reset", "reset .*dict"),
    ("Mistaken", "info", "info is .*None"),
    ("Mistaken", "step", "step .*own_processes=false out"),
    ("Mistaken", "none", "reward is .*None"),
    ("Mistaken", "shape", "reward is "),
    ("Mistaken", "text", "reward is "),
])  # fmt: skip
def test_method_that_returns_or_takes_something_else_is_named_with_its_file(task: str, what: str, message: str) -> None:
    adapted = make(f"{OWN}{task}", f'{{"what":"{what}"}}' if what else "{}")
    with pytest.raises(BrokenEnvironment, match=rf"{message}.* \(.*tests/rigs/environments.py, line \d+\)$"):
        reset_and_step(adapted)


@PLACES
@pytest.mark.parametrize("at", ["reset", "step"])
def test_exception_of_an_environment_is_one_line(at: str, place: str) -> None:
    settings = config(f"{OWN}Raises", place, f"environment.settings={{at: {at}, step: 3}}")
    with pytest.raises(BrokenEnvironment, match=rf"ValueError: the {at} failed \(.*environments.py, line \d+\)$"):
        play(settings, [1, 2], 10)


@PROCESSES
@pytest.mark.parametrize("made", ["true", "false"])
def test_death_of_an_environment_s_process_when_it_is_made_or_later_is_one_line_with_its_exit_code(
    place: str, made: str
) -> None:
    with pytest.raises(BrokenEnvironment, match="exit code 7"):
        play(config(f"{OWN}Dies", place, f"environment.settings={{made: {made}}}"), [1, 2], 10)


@PROCESSES
def test_hanging_environment_is_one_line_and_its_process_is_ended(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "ANSWER_SECONDS", 1.0)
    settings = config(f"{OWN}Hangs", place, f"environment.settings={{processes: {tmp_path / 'processes'}}}")
    environment = VectorEnvironment(settings, describe(settings), np.array([1, 2]), 60)
    for _ in range(3):
        environment.send(np.zeros(2, np.int32), environment.receive().env_id)
    with pytest.raises(BrokenEnvironment, match="has not answered in time"):
        environment.receive()
    environment.close()
    wait_for_the_end_of(*processes_of(tmp_path / "processes"))


@PROCESSES
def test_environment_that_hangs_while_it_is_made_is_one_line(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = config(f"{OWN}Hangs", place, f"environment.settings={{made: {tmp_path / 'made'}}}")
    environment_spec = describe(settings)
    monkeypatch.setattr(processes, "START_SECONDS", 1.0)
    with pytest.raises(BrokenEnvironment, match="has not answered in time"):
        VectorEnvironment(settings, environment_spec, np.array([1, 2]), 60)


@PROCESSES
@pytest.mark.parametrize("end", ["closed", "failed", "killed"])
def test_processes_that_environments_start_end_with_them(place: str, end: str, tmp_path: Path) -> None:
    started, closed = tmp_path / "processes", tmp_path / "closed"
    fails = ", step: 3" if end == "failed" else ""
    settings = config(
        f"{OWN}Simulated", place, f"environment.settings={{processes: {started}, closed: {closed}{fails}}}"
    )
    environment_spec = describe(settings)
    wait_for_the_end_of(*processes_of(started))  # those of the environment that was described
    assert os.getpid() not in processes_of(started)[0]
    assert len(closed.read_text().split()) == 1
    environment = VectorEnvironment(settings, environment_spec, np.array([1, 2]), 60, per_step=1)
    leaders = processes_of(started)[0][1:]
    with contextlib.closing(environment), contextlib.suppress(BrokenEnvironment):
        for number in range(8):
            step = environment.receive()
            if end == "killed" and number == 0:  # later, the number may be another process's
                os.kill(leaders[0], signal.SIGKILL)
            environment.send(np.zeros(1, np.int32), step.env_id)
    wait_for_the_end_of(*processes_of(started))
    assert sorted(map(int, closed.read_text().split()[1:])) == sorted(leaders[1:] if end == "killed" else leaders)


@PROCESSES
@pytest.mark.parametrize("per_step", [1, 2])
def test_environment_that_cannot_be_made_in_its_process_is_one_line_and_ends_the_others(
    place: str, per_step: int, tmp_path: Path
) -> None:
    processes = tmp_path / "processes"
    arguments = f"environment.settings={{processes: {processes}, closed: {tmp_path / 'closed'}, most: 2}}"
    settings = config(f"{OWN}Simulated", place, arguments)
    with pytest.raises(BrokenEnvironment, match=r"ValueError: there are too many \(.*environments.py, line \d+\)$"):
        VectorEnvironment(settings, describe(settings), np.array([1, 2]), 60, per_step=per_step)
    leaders, started = processes_of(processes)
    assert len(leaders) == 3
    wait_for_the_end_of(leaders, started)


@PLACES
def test_numbers_beyond_their_bounds_are_used_as_they_are_with_one_warning_and_a_count(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rows = play(config(f"{OWN}Long", place), [1, 2], steps=10)
    assert {float(step.observation[0, 0]) for row in rows for step in row} == {3.0}, "the length"
    warning, count = (record for record in caplog.records if "beyond" in record.message)
    assert warning.levelname == "WARNING"
    assert all(word in warning.message for word in ("observation[end] is 3", "0 to 2.5"))
    assert (count.levelname, count.message.split()[0]) == ("INFO", "20")
