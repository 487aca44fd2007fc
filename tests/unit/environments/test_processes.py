"""Environments in processes of another interpreter: old ones of gym, values that cross, mistakes, and their end."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.config.load import code_settings
from apex_jax.environments import served
from apex_jax.environments.environment import describe
from apex_jax.environments.processes import Interpreter
from apex_jax.environments.served import packed, received
from apex_jax.host.errors import RunError, UsageError
from tests.rigs.environments import processes_of
from tests.rigs.processes import ROOT, wait_for_the_end_of
from tests.unit.environments.test_gymnasium_pool import OWN, config, play

OLD_GYM = '''
import numpy as np
from gym import spaces
class Env: metadata = {}
def spec(name):
    if name != "Old-v0": raise KeyError(f"no {name}")
def make(name, length=3): return Old(length)
class Old(Env):
    """Counts, from a seed; ends at an odd number, or is cut off at the limit."""
    metadata = {"render.modes": ["rgb_array"], "video.frames_per_second": 5}
    observation_space, action_space = spaces.Box(0, 99, (1,), np.float32), spaces.Discrete(2)
    def __init__(self, length): self.length, self.first = length, 0
    def seed(self, seed): self.first = seed
    def reset(self):
        self.number, self.steps = self.first, 0
        return np.float32([self.number])
    def step(self, action):
        self.number, self.steps = self.number + 1 + action, self.steps + 1
        is_cut = self.steps == self.length
        info = {"TimeLimit.truncated": True, "score": self.number} if is_cut else {}
        return np.float32([self.number]), 0.5, is_cut or self.number % 10 == 9, info
    def render(self, mode): return np.full((4, 4, 3), self.number, np.uint8) if mode == "rgb_array" else None
'''
OLD_SPACES = """
import numpy as np
class Box:
    def __init__(self, low, high, shape, dtype):
        self.low, self.high = np.full(shape, low, dtype), np.full(shape, high, dtype)
        self.shape, self.dtype = shape, np.dtype(dtype)
class Discrete:
    shape, dtype = (), np.dtype(int)
    def __init__(self, n): self.n = n
"""


@pytest.mark.parametrize("value", [
    None, True, -3, 2.5, float("nan"), -float("inf"), 2**70, "a text", "\udc80",
    np.float64(0.1), np.uint8(7), np.array([[1.5, -2.0]], np.float32),
    np.zeros((0, 3), np.int16), np.array(True), np.arange(6).reshape(2, 3).T, np.ones(2, ">f4"),
    {"a": (np.arange(3), [1, "x"]), 2: {}}, (), [],
])  # fmt: skip
def test_value_arrives_as_it_was(value: Any) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(packed(value))
        found = received(there)
    assert repr(found) == repr(value[()] if isinstance(value, np.ndarray) else value)
    assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
    assert not isinstance(found, np.ndarray) or found.flags.writeable


def test_value_that_is_no_number_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"object object.*which is no number"):
        packed({"a": object()})


def test_file_that_other_interpreters_run_is_of_python_3_8_and_needs_only_numpy() -> None:
    tree = ast.parse(Path(served.__file__).read_text(), feature_version=(3, 8))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} - {"numpy"} <= sys.stdlib_module_names


@pytest.mark.parametrize(("task", "settings"), [
    ("Combines", ""), ("Bits", ""), ("Acts", "what: start"), ("Acts", "what: float64"), ("Pixels", ""),
])  # fmt: skip
def test_steps_are_those_of_environments_in_this_process(task: str, settings: str) -> None:
    here, there = (
        play(config(f"{OWN}{task}", place, f"environment.settings={{{settings}}}"), [4, 5], 20)
        for place in ("one process", "other Python")
    )
    for row, other in zip(here, there, strict=True):
        for step, same in zip(row, other, strict=False):
            np.testing.assert_equal(same, step)


def test_environment_of_old_gym_begins_ends_is_cut_off_and_renders_as_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gym").mkdir()
    (tmp_path / "gym" / "__init__.py").write_text(OLD_GYM)
    (tmp_path / "gym" / "spaces.py").write_text(OLD_SPACES)
    monkeypatch.chdir(tmp_path)
    settings = config("gymnasium:Old-v0", "other Python", "metrics.info=[score]", "environment.settings={length: 4}")
    described = describe(settings, is_tried=True)
    assert described.frames_per_second == 5.0
    [steps] = play(settings, [5], 20)
    number = 5
    for before, step in zip([None, *steps], steps, strict=False):
        if before is None or before.terminated or before.truncated:
            number, count = 5, 0
            assert [bool(step.first), float(step.reward)] == [True, 0.0]
        else:
            number, count = int(step.observation[0, 0]), count + 1
            assert number - int(before.observation[0, 0]) in (1, 2)
            assert step.reward == 0.5
            assert step.terminated == (number % 10 == 9 and count < 4)
            assert step.truncated == (count == 4)
            assert (step.info[0] == number) if count == 4 else np.isnan(step.info[0])
        assert step.observation[0, 0] == number
    assert any(step.truncated for step in steps)
    assert any(step.terminated for step in steps)


@pytest.mark.parametrize("line", [
    "0", "threading.Timer(99, int).start()", "(kept := subprocess.Popen(['true'])) and 0",
    "(kept := numpy.random.default_rng()).random()", "(kept := random.Random()).random()", "numpy.random.rand()",
])  # fmt: skip
def test_module_of_a_task_is_imported_once_for_all_processes_unless_it_has_threads_processes_or_random_numbers(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"import gymnasium, numpy, os, random, subprocess, threading\nDRAWN = {line}\ndef of(_): return str(SEEN)\n"
    text += "SEEN = DRAWN or os.getpid()\ndef make(): return gymnasium.make('CartPole-v1')"
    (tmp_path / "own.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(Interpreter("", 2, "gymnasium:own:make")) as interpreter:
        for seed, channel in enumerate(interpreter.channels):
            channel.ask("", 60.0, "make", "own", "make", {}, seed, False, ())
        seen = {channel.ask("", 60.0, "call", "own", "of", "") for channel in interpreter.channels}
    assert len(seen) == (1 if line == "0" else 2)


@pytest.mark.parametrize(("overrides", "error", "words"), [
    (["environment.python=/no/python"], UsageError, "environment.python=/no/python: there is no such program"),
    (["environment.task=Pong-v5"], UsageError, "environment.python=.*: is for tasks of gymnasium:... only"),
    (["environment.python=/bin/false"], RunError, "ended with exit code 1; .* must be Python 3.8 or later"),
    (["environment.task=gymnasium:NoSuch-v0"], UsageError, "NoSuch.*give gymnasium:ID"),
    (["environment.task=gymnasium:no_such_module:A"], UsageError, "there is no module no_such_module"),
    (["environment.task=gymnasium:math:A-v0"], UsageError, "math has no function A-v0, and registers no such"),
    ([f"environment.task={OWN}Raises", "environment.settings={at: made}"], RunError, "made failed .*environments.py"),
    ([f"environment.task={OWN}Corridor", "environment.settings={lenth: 3}"], RunError, "lenth.*environments.py"),
    ([f"environment.task={OWN}Mistaken", "environment.settings={what: none}"], RunError, "reward is .*not one number$"),
])  # fmt: skip
def test_mistake_is_one_line(overrides: list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as raised:
        describe(config("gymnasium:CartPole-v1", "other Python", *overrides), is_tried=True)
    assert "\n" not in str(raised.value)


def test_interpreter_of_a_run_is_code_which_its_user_has_to_name() -> None:
    settings = config("gymnasium:CartPole-v1", "other Python")
    named = {"environment.task": "gymnasium:CartPole-v1", "environment.python": settings.environment.python}
    assert code_settings(settings) == named


ACTOR = """
import sys, time, numpy as np
from tests.unit.environments.test_gymnasium_pool import config
from apex_jax.environments.environment import VectorEnvironment, describe
task, settings = sys.argv[1:]
settings = config(task, "processes", f"environment.settings={settings}")
environment = VectorEnvironment(settings, describe(settings), np.arange(2), 60)
for _ in range(3):
    environment.send(np.zeros(2, np.int32), environment.receive().env_id)
print("plays", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("task", ["Hangs", "Simulated"])
def test_processes_of_environments_end_when_the_actor_is_killed(task: str, tmp_path: Path) -> None:
    files = {"processes": tmp_path / "processes", **({"closed": tmp_path / "closed"} if task == "Simulated" else {})}
    settings = f"{{{', '.join(f'{name}: {path}' for name, path in files.items())}}}"
    command = [sys.executable, "-c", ACTOR, f"{OWN}{task}", settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}) as actor:
        assert actor.stdout is not None
        assert actor.stdout.readline() == "plays\n"
        actor.send_signal(signal.SIGKILL)
    wait_for_the_end_of(*processes_of(tmp_path / "processes"))
