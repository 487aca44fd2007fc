"""An episode in another process: its records, and the errors of a process that fails."""

from __future__ import annotations

import re
import signal
import sys
import textwrap
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from apex_jax.environments import reference_simulator
from apex_jax.environments.reference_simulator import ReferenceSimulator, SimulatorError
from apex_jax.host.errors import RunError
from tests.rigs.processes import ROOT, wait_for_the_end_of

HEADER = '{"observation_size": 3, "action_size": 2, "height": 4, "width": 5, "frames_per_second": 33.3333333333}'
CHILD = f"""
    import os, signal, sys, time
    import numpy as np
    sys.path.insert(0, {str(ROOT)!r})
    from apex_jax.environments.reference_simulator import HEADER_BYTES, Header, record_type
    answers = sys.stdout.buffer
    def head(text):
        answers.write(text.encode().ljust(HEADER_BYTES))
    def answer(reward, ended, drawn, observation, pixel):
        record = np.zeros((), record_type(Header(3, 2, 4, 5, 0)))
        record[()] = (reward, ended, drawn, observation, pixel)
        answers.write(record.tobytes())
        answers.flush()
    def action():
        return np.frombuffer(sys.stdin.buffer.read(8), "<f4")
"""


def child(lines: str) -> list[str]:
    """Returns the command of a child that runs these lines."""
    return [sys.executable, "-c", textwrap.dedent(CHILD) + textwrap.dedent(lines)]


def started(lines: str) -> str:
    """Returns the lines of a child that sends its header and first observation, then runs these."""
    return f"head({HEADER!r})\nanswer(0, False, True, 0, 0)\n{textwrap.dedent(lines)}"


def is_shown(played: ReferenceSimulator) -> bool:
    """Returns whether the newest step is part of the film."""
    return played.screen is not None


def test_every_action_is_answered_by_observation_reward_end_and_screen() -> None:
    lines = f"""
    head({HEADER!r})
    answer(0, False, True, [1, 2, 3], 7)
    first, last = action(), None
    answer(1e-9, False, False, [*first, 0], 7)
    last = action()
    answer(-2.5, True, True, [*last, 1], 255)
    """
    with ReferenceSimulator("Task-v1", 1, child(lines)) as played:
        assert (played.action_size, played.frames_per_second) == (2, Fraction(100, 3))
        assert played.observation.tolist() == [1, 2, 3]
        assert played.observation.dtype == np.float32
        assert is_shown(played)
        np.testing.assert_array_equal(played.screen, np.full((4, 5, 3), 7, np.uint8), strict=True)
        observation, reward, ended = played.step(np.array([0.5, -1.0]))
        assert (observation.tolist(), reward, ended) == ([0.5, -1, 0], 1e-9, False)
        assert not is_shown(played)
        observation, reward, ended = played.step(np.array([0.25, 1], np.float32))
        assert (observation.tolist(), reward, ended) == ([0.25, 1, 1], -2.5, True)
        assert is_shown(played)
        assert np.unique(np.array(played.screen)).tolist() == [255]
        with pytest.raises(SimulatorError, match=r"its simulator ended with exit code 0$"):
            played.step(np.zeros(2))


def test_action_of_another_size_is_an_error_of_the_caller() -> None:
    with (
        ReferenceSimulator("Task-v1", 1, child(started("action()"))) as played,
        pytest.raises(ValueError, match=r"takes 2 numbers .* not \(3,\)"),
    ):
        played.step(np.zeros(3))


def test_error_of_the_child_is_raised_on_one_line() -> None:
    with pytest.raises(RunError) as raised:
        ReferenceSimulator("Task-v1", 1, child("""head('{"error": "no such task\\\\n at all"}')"""))
    assert str(raised.value) == r"Task-v1 cannot be filmed: 'no such task\n at all'"


@pytest.mark.parametrize("sent", ["", "answers.write(b'part of a header')\nanswers.flush()\n"])
def test_death_of_the_child_at_its_start_is_an_error_with_its_last_line(sent: str) -> None:
    dies = "print('a warning', file=sys.stderr)\nraise SystemError('no GPU')"
    with pytest.raises(
        SimulatorError, match=r"^Task-v1 cannot be filmed: its simulator ended with exit code 1: SystemError: no GPU$"
    ):
        ReferenceSimulator("Task-v1", 1, child(sent + dies))


@pytest.mark.parametrize(("lines", "words"), [
    ("action()\nraise ValueError('Physics state is invalid.')", "1: ValueError: Physics state is invalid."),
    ("action()\nos.kill(os.getpid(), signal.SIGKILL)", f"{-signal.SIGKILL}"),
    ("os.kill(os.getpid(), signal.SIGKILL)", f"{-signal.SIGKILL}"),  # before it reads the action
])  # fmt: skip
def test_death_of_the_child_at_a_step_is_an_error_with_its_last_line(lines: str, words: str) -> None:
    with (
        ReferenceSimulator("Task-v1", 1, child(started(lines))) as played,
        pytest.raises(SimulatorError, match=re.escape(f"its simulator ended with exit code {words}")),
    ):
        played.step(np.zeros(2))


def test_child_that_hangs_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_simulator, "STEP_SECONDS", 0.1)
    with (
        ReferenceSimulator("Task-v1", 1, child(started("time.sleep(600)"))) as played,
        pytest.raises(SimulatorError, match=r"its simulator has not answered within 0\.1 s"),
    ):
        played.step(np.zeros(2))
    monkeypatch.setattr(reference_simulator, "START_SECONDS", 0.1)
    with pytest.raises(SimulatorError, match=r"its simulator has not answered within 0\.1 s"):
        ReferenceSimulator("Task-v1", 1, child("time.sleep(600)"))


def test_close_ends_the_child_and_may_be_called_again(tmp_path: Path) -> None:
    written = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    played = ReferenceSimulator("Task-v1", 1, child(f"{written}{started('time.sleep(600)')}"))
    played.close()
    played.close()
    wait_for_the_end_of([int((tmp_path / "pid").read_text())])


def test_real_child_rejects_tasks_without_continuous_actions() -> None:
    with pytest.raises(SimulatorError, match=r"^Catch-v0 cannot be filmed: (neither Gymnasium nor DM|dm_control)"):
        ReferenceSimulator("Catch-v0", 1)
    with pytest.raises(SimulatorError, match=r"^CartPole-v1 cannot be filmed: its actions are not continuous$"):
        ReferenceSimulator("CartPole-v1", 1)
