"""Specification of the frozen policy: one function of observations that acts as the policy does, for any batch."""

from __future__ import annotations

import numpy as np
import pytest

from apex_jax.agent.frozen_policy import any_batch, frozen
from apex_jax.policy import Policy
from tests.rigs.exported import KINDS, agent_of, observations_of


@pytest.mark.parametrize("kind", KINDS)
def test_actions_and_values_are_those_of_the_policy(kind: str) -> None:
    agent = agent_of(kind)
    assert agent.algorithm.greedy is not None
    observations = observations_of(agent.interface, 6)
    actions, values = Policy(agent.algorithm, agent.params, agent.interface).act(observations)
    outputs = frozen(agent.algorithm.greedy, agent.params, agent.interface)(observations)  # type: ignore[arg-type]
    np.testing.assert_allclose(outputs["action"], actions, rtol=1e-5, atol=1e-5)
    if actions.dtype == np.int32:
        assert outputs["q_values"].shape == (6, agent.interface.spec.action.num_actions)
        np.testing.assert_allclose(outputs["q_values"].max(axis=1), values, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_allclose(outputs["value"], values, rtol=1e-5, atol=1e-5)


def test_the_size_of_a_batch_is_symbolic() -> None:
    like = any_batch(agent_of("pixels in stacks").interface)
    assert [str(size) for size in like.shape] == ["batch", "3", "44", "44"]
    assert like.dtype == np.uint8
    assert [str(size) for size in any_batch(agent_of("a vector").interface).shape] == ["batch", "10"]
