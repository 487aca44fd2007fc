"""An episode in another process: its steps and frames, and the errors of a process that fails."""

from __future__ import annotations

import signal
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from apex_jax.environments import reference_simulator
from apex_jax.environments.reference_simulator import ReferenceSimulator, SimulatorError
from tests.rigs import simulators


def start(monkeypatch: pytest.MonkeyPatch, play: Callable[..., Any]) -> ReferenceSimulator:
    monkeypatch.setattr(reference_simulator, "play", play)
    return ReferenceSimulator("Task-v1", 1)


def test_every_action_is_answered_by_observation_reward_end_and_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    with start(monkeypatch, simulators.slow) as simulator:
        assert (simulator.action_size, simulator.frames_per_second) == (2, Fraction(20))
        assert simulator.observation.tolist() == [0, 0]
        for number, (action, scaled) in enumerate([([0, 0], [0, 0.5]), ([-1, -1], [-2, 0]), ([1, 1], [2, 1])], 1):
            observation, reward, ended = simulator.step(np.array(action))
            assert (observation.tolist(), reward, ended) == (scaled, number / 3, number == 3)
            assert observation.dtype == np.float32
            np.testing.assert_array_equal(simulator.frame, np.full((2, 4, 3), number, np.uint8), strict=True)
        with pytest.raises(SimulatorError, match=r"^Task-v1 cannot be rendered: its simulator ended with exit code 0$"):
            simulator.step(np.zeros(2))


def test_fast_tasks_are_drawn_at_up_to_30_frames_a_second_and_at_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with start(monkeypatch, simulators.fast) as simulator:
        assert simulator.frames_per_second == Fraction(25)
        drawn = [simulator.frame is not None]
        for _ in range(6):
            simulator.step(np.zeros(2))
            drawn.append(simulator.frame is not None)
    assert drawn == [True, False, False, False, True, False, True]


@pytest.mark.parametrize(("play", "reason"), [
    (simulators.dies_at_the_start, f"ended with exit code {-signal.SIGKILL}"),
    (simulators.hangs_at_the_start, "has not answered within 1 s"),
    (simulators.dies_at_a_step, f"ended with exit code {-signal.SIGKILL}"),
    (simulators.hangs_at_a_step, "has not answered within 1 s"),
])  # fmt: skip
def test_process_that_ends_or_hangs_is_one_line(
    monkeypatch: pytest.MonkeyPatch, play: Callable[..., Any], reason: str
) -> None:
    if "not answered" in reason:
        limit = "START_SECONDS" if play is simulators.hangs_at_the_start else "STEP_SECONDS"
        monkeypatch.setattr(reference_simulator, limit, 1.0)
    with (
        pytest.raises(SimulatorError, match=f"^Task-v1 cannot be rendered: its simulator {reason}$"),
        start(monkeypatch, play) as simulator,
    ):
        simulator.step(np.zeros(2))


def test_tasks_without_continuous_actions_are_refused() -> None:
    with pytest.raises(SimulatorError, match=r"^Catch-v0 cannot be rendered: (neither Gymnasium nor DM|dm_control)"):
        ReferenceSimulator("Catch-v0", 1)
    with pytest.raises(SimulatorError, match=r"^CartPole-v1 cannot be rendered: its actions are not continuous$"):
        ReferenceSimulator("CartPole-v1", 1)
