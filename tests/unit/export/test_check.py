"""Specification of the check: real observations, and no output may differ by more than the tolerance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apex_jax.export.check import check_outputs, expected_outputs, real_observations
from apex_jax.host.errors import RunError
from tests.rigs.exported import agent_of, observations_of
from tests.rigs.saved_runs import config_of

ACTION, VALUE = np.zeros((2, 3), np.float32), np.array([100.0, -300.0], np.float32)
Q_VALUES = np.array([[1.0, 1.0, 0.0], [0.0, 2.0, 3.0]], np.float32)


def test_observations_are_of_many_episodes_and_the_same_each_time(tmp_path: Path) -> None:
    config = config_of("Catch-v0", tmp_path)
    observations = real_observations(config)
    assert observations.shape == (64, 1, 50)
    assert len(np.unique(observations, axis=0)) > 20
    np.testing.assert_array_equal(real_observations(config), observations)


def test_expected_actions_are_within_the_bounds_and_values_are_those_of_the_policy() -> None:
    agent = agent_of("continuous, normalized")
    expected = expected_outputs(agent, observations_of(agent.environment_spec, 20)[:, None])
    assert {name: each.shape for name, each in expected.items()} == {"action": (20, 2), "value": (20,)}
    assert (expected["action"].min(axis=0) >= [-2, 0]).all()
    assert (expected["action"].max(axis=0) <= [2, 10]).all()
    assert expected["action"].max() > 2


def test_differences_of_rounding_are_accepted() -> None:
    check_outputs("f", {"action": ACTION + 9e-6, "value": VALUE + 2.9e-3}, {"action": ACTION, "value": VALUE})


@pytest.mark.parametrize(("outputs", "message"), [
    ({"action": ACTION + 1.1e-5, "value": VALUE}, "^f .*action by 1.1e-05"),
    ({"action": ACTION, "value": VALUE + np.array([0, 0.004])}, "value by 1.3e-05"),
    ({"action": ACTION, "value": VALUE * np.nan}, "value by nan"),
    ({"action": ACTION}, r"f has no output value of shape \(2,\)"),
    ({"action": ACTION[:1], "value": VALUE}, r"f has no output action of shape \(2, 3\)"),
])  # fmt: skip
def test_difference_beyond_rounding_is_one_line_of_error(outputs: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(RunError, match=message):
        check_outputs("f", outputs, {"action": ACTION, "value": VALUE})


def test_either_of_two_actions_of_equal_value_is_accepted() -> None:
    expected = {"action": np.array([0, 2]), "q_values": Q_VALUES}
    check_outputs("f", {"action": np.array([1, 2]), "q_values": Q_VALUES}, expected)
    with pytest.raises(RunError, match="action by"):
        check_outputs("f", {"action": np.array([0, 1]), "q_values": Q_VALUES}, expected)
