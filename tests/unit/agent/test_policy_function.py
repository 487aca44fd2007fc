"""Specification of the function of a policy: it acts on observations as the policy does, for any batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from apex_jax.agent.policy_function import any_batch, for_any_batch, policy_function
from apex_jax.host.errors import RunError
from apex_jax.policy import Policy
from tests.rigs.exported import KINDS, agent_of, observations_of


@pytest.mark.parametrize("kind", KINDS)
def test_actions_and_values_are_those_of_the_policy(kind: str) -> None:
    agent = agent_of(kind)
    assert agent.algorithm.greedy is not None
    observations = observations_of(agent.environment_spec, 6)
    actions, values = Policy(agent.algorithm, agent.params, agent.environment_spec).act(observations)
    function = policy_function(agent.algorithm.greedy, agent.params, agent.environment_spec)
    outputs = function(observations)  # type: ignore[arg-type]
    np.testing.assert_allclose(outputs["action"], actions, rtol=1e-5, atol=1e-5)
    if actions.dtype == np.int32:
        assert outputs["q_values"].shape == (6, agent.environment_spec.spec.action.num_actions)
        np.testing.assert_allclose(outputs["q_values"].max(axis=1), values, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_allclose(outputs["value"], values, rtol=1e-5, atol=1e-5)


def test_a_network_that_needs_the_size_of_a_batch_as_a_number_is_mapped_over_the_batch() -> None:
    def outputs(x: jax.Array) -> dict[str, jax.Array]:
        return {"q": x.reshape(len(x), 2, -1).sum(axis=2)}

    environment_spec = agent_of("a vector").environment_spec
    like, x = any_batch(environment_spec), observations_of(environment_spec, 5)
    with pytest.raises(TypeError):
        export.export(jax.jit(outputs))(like)
    exported = export.export(for_any_batch(outputs, like))(like)  # type: ignore[arg-type]
    np.testing.assert_allclose(exported.call(x)["q"], outputs(jnp.asarray(x))["q"], rtol=1e-6)


def test_a_network_that_cannot_be_traced_is_one_line_of_error() -> None:
    def outputs(x: jax.Array) -> dict[str, jax.Array]:
        raise TypeError("two\nlines") if x.sum() else AssertionError

    with pytest.raises(RunError, match=r"cannot be traced for a batch of any size: .*; nothing is written$"):
        for_any_batch(outputs, any_batch(agent_of("a vector").environment_spec))
