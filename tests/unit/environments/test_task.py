"""Actions of a task, from Gymnasium's spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary

from apex_jax.agent.algorithm import Action
from apex_jax.environments.environment import VectorEnvironment, environment_spec_of, segment_spec
from apex_jax.environments.task import action_bounds, action_spec, check_bounds
from apex_jax.host.errors import UsageError
from apex_jax.policy import Policy
from apex_jax.types import ActionSpec
from tests.rigs import environments
from tests.unit.environments.test_gymnasium_tasks import OWN, config


@pytest.mark.parametrize(
    ("low", "high", "bounds"),
    [
        ([-2, -0.5], [2, 0.25], ([-2, -0.5], [2, 0.25])),
        ([-1e10, -2e6], [1e10, 2e6], ([-1, -1], [1, 1])),
        ([-np.inf, -3], [np.inf, 3], ([-1, -3], [1, 3])),
        ([-9e5], [9e5], ([-9e5], [9e5])),
    ],
)
def test_bounds_beyond_a_million_count_as_minus_1_and_1(low: Any, high: Any, bounds: Any) -> None:
    found = action_bounds(Box(np.array(low, np.float64), np.array(high, np.float64), dtype=np.float64))
    np.testing.assert_array_equal(found, bounds)
    assert {bound.dtype for bound in found} == {np.dtype(np.float64)}


def test_whole_numbers_or_a_vector_are_actions() -> None:
    assert action_spec("A", Discrete(3)) == action_spec("A", Discrete(3, start=-1)) == ActionSpec.discrete(3)
    assert action_spec("A", Box(-2, 2, (4,), np.float32)) == ActionSpec.continuous(4)


@pytest.mark.parametrize(("low", "high"), [(2, np.inf), (-np.inf, 0), (-np.inf, np.inf), (-1e10, 1e10), (0, 2e6)])
def test_open_bound_is_refused_with_the_wrapper_that_closes_it(low: float, high: float) -> None:
    check_bounds("A", Box(-2, 9e5, (2,)))
    with pytest.raises(UsageError, match=r"A: its actions, Box.* have an open bound .*TransformAction"):
        check_bounds("A", Box(np.array([-1, low]), np.array([1, high]), dtype=np.float64))


@pytest.mark.parametrize("space", [Box(-1, 1, (2, 2)), Box(0, 9, (2,), np.int64), MultiBinary(3)])
def test_other_actions_are_refused(space: Any) -> None:
    with pytest.raises(UsageError, match=r"environment\.task=A: no algorithm here has its actions"):
        action_spec("A", space)


@pytest.mark.parametrize("what", ["start", "float32", "float64", "float16"])
def test_space_contains_every_action_of_actors_and_policies(what: str) -> None:
    settings = config(f"{OWN}Acts", f"environment.settings={{what: {what}}}", "environment.own_processes=false")
    spec = segment_spec(settings)
    environment = VectorEnvironment(settings, spec, np.zeros(1, np.int64), 60)
    environment_spec = environment_spec_of(settings, spec)

    class Algorithm:
        action: np.ndarray

        def act(self, params: Any, observation: np.ndarray, *_: Any) -> Any:
            return Action(self.action, np.zeros(1), np.zeros(1))  # type: ignore[arg-type]

    algorithm = Algorithm()
    space: Any = environments.Acts(what).action_space
    bounds = (5, 6) if what == "start" else (space.low, space.high)
    environment.receive()
    for end, bound in zip((spec.action.low, spec.action.high), bounds, strict=True):
        algorithm.action = np.full((1, *spec.action.shape), end, spec.action.dtype)
        environment.send(algorithm.action, np.zeros(1, np.int32))
        environment.receive()
        of_policy = Policy(algorithm, {}, environment_spec)(environments.Corridor().observation())  # type: ignore[arg-type]
        assert space.contains(of_policy)
        np.testing.assert_array_equal(of_policy, bound)
        np.testing.assert_array_equal(environments.Acts.actions[-1], bound)
    environment.close()
