"""Exported programs compute what the policy does, also where there is no apex_jax; each is checked when written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from jax import export

from apex_jax.agent.policy_function import any_batch, for_any_batch, policy_function
from apex_jax.export.folder import (
    ONNX,
    STABLEHLO,
    check_outputs,
    expected_outputs,
    observations_of,
    run_onnx,
    run_stablehlo,
    unstacked,
    write_onnx,
    write_stablehlo,
)
from apex_jax.export.onnx_graph import onnx_model
from apex_jax.host.errors import RunError
from apex_jax.policy import Agent
from apex_jax.types import map_parts
from tests.rigs.exported import KINDS, agent_of

ACTION, VALUE = np.zeros((2, 3), np.float32), np.array([100.0, -300.0], np.float32)
Q_VALUES = np.array([[1.0, 1.0, 0.0], [0.0, 2.0, 3.0]], np.float32)
CONSTANT = np.linspace(-1, 2, 12, dtype=np.float32)
KERNEL = jnp.array(CONSTANT[:8].reshape(2, 1, 2, 2))
QUICK = "a vector with a mask, several parts of an action"
OF_CI = ("pixels in stacks", "a vector, one stream", "continuous, normalized")
every_kind = [
    pytest.param(kind, marks=() if kind == QUICK else pytest.mark.ci if kind in OF_CI else pytest.mark.long, id=kind)
    for kind in KINDS
]


def function_of(agent: Agent) -> tuple[Any, Any]:
    """Returns the function of an agent's policy, and what it takes."""
    assert agent.algorithm.greedy is not None
    function = policy_function(agent.algorithm.greedy, agent.params, agent.environment_spec)
    return function, any_batch(agent.environment_spec)


@pytest.mark.parametrize("kind", every_kind)
def test_either_file_computes_what_the_policy_does(kind: str, tmp_path: Path) -> None:
    agent = agent_of(kind)
    spec, numbered = agent.environment_spec.spec, agent.environment_spec.numbered
    write_stablehlo(tmp_path / STABLEHLO, *function_of(agent))
    assert write_onnx(tmp_path / ONNX, *function_of(agent)) == ""
    stacks = jax.tree.map(lambda x: x[:9], observations_of(spec))
    observations, expected = map_parts(unstacked, spec.observation, stacks), expected_outputs(agent, stacks)
    for compute, file in ((run_stablehlo, STABLEHLO), (run_onnx, ONNX)):
        for count in (1, 9):
            outputs = compute(tmp_path / file, jax.tree.map(itemgetter(slice(count)), observations))
            wanted = {name: x[:count] for name, x in expected.items()}
            assert {name: x.dtype for name, x in outputs.items()} == {name: x.dtype for name, x in wanted.items()}
            check_outputs("a program", outputs, wanted, numbered)


def test_the_stablehlo_is_for_cpu_and_cuda_and_multiplies_in_float32(tmp_path: Path) -> None:
    write_stablehlo(tmp_path / "p", *function_of(agent_of("a vector")))
    exported = export.deserialize(bytearray((tmp_path / "p").read_bytes()))
    assert exported.platforms == ("cpu", "cuda")
    assert "HIGHEST" in exported.mlir_module()
    assert "DEFAULT" not in exported.mlir_module()


def test_without_the_package_onnx_nothing_is_written_and_the_command_to_install_it_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "apex_jax.export.onnx_graph", raising=False)
    agent = agent_of("a vector")
    problem = write_onnx(tmp_path / "p", lambda x: {"y": x}, any_batch(agent.environment_spec))
    assert "onnx" in problem
    assert "pip install -r requirements-export.txt" in problem
    assert not (tmp_path / "p").exists()


# The function of the policy --------------------------------------------------------------------------------------


def test_a_network_that_needs_the_size_of_a_batch_as_a_number_is_mapped_over_the_batch() -> None:
    def outputs(x: jax.Array) -> dict[str, jax.Array]:
        return {"q": x.reshape(len(x), 2, -1).sum(axis=2)}

    environment_spec = agent_of("a vector").environment_spec
    like, x = any_batch(environment_spec), observations_of(environment_spec.spec)[:5, 0]
    with pytest.raises(TypeError):
        export.export(jax.jit(outputs))(like)
    exported = export.export(for_any_batch(outputs, like))(like)  # type: ignore[arg-type]
    np.testing.assert_allclose(exported.call(x)["q"], outputs(jnp.asarray(x))["q"], rtol=1e-6)


def test_a_network_that_cannot_be_traced_is_one_line_of_error() -> None:
    def outputs(x: jax.Array) -> dict[str, jax.Array]:
        raise TypeError("two\nlines") if x.sum() else AssertionError

    with pytest.raises(RunError, match=r"cannot be traced for a batch of any size: .*; nothing is written$"):
        for_any_batch(outputs, any_batch(agent_of("a vector").environment_spec))


# Operations of ONNX ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [
    lambda x: jnp.exp(-jnp.abs(x)) + jnp.log(x**2 + 1) - jnp.minimum(x, 0.5) * jax.nn.sigmoid(x),
    lambda x: (x + 1) ** 0.5 * x,
    lambda x: jnp.sqrt(jnp.square(x) + CONSTANT) / jnp.tanh(x + 3),
    lambda x: (x - x.max(axis=1, keepdims=True)).sum(axis=-1),
    lambda x: jnp.concatenate([x, jax.lax.rsqrt(jnp.square(x) + 1)], axis=1).astype(jnp.int32),
    lambda x: x.reshape(x.shape[0], 3, 4).transpose(0, 2, 1).sum(axis=(1, 2)),
    lambda x: jnp.broadcast_to(x[:, None, :], (x.shape[0], 2, 12)).argmax(axis=2),
    lambda x: (jnp.split(x, [4, 9], axis=1)[1] @ CONSTANT.reshape(12, 1)[:5]).squeeze(1),
    lambda x: jax.lax.conv_general_dilated(
        x.reshape(x.shape[0], 1, 3, 4), KERNEL, (1, 2), [(1, 0), (0, 2)], rhs_dilation=(1, 2)
    ).reshape(x.shape[0], -1),
])  # fmt: skip
def test_each_operation_computes_what_jax_computes(function: Callable[[jax.Array], jax.Array]) -> None:
    [batch] = export.symbolic_shape("n")
    model = onnx_model(lambda x: {"y": function(x)}, "x", jax.ShapeDtypeStruct((batch, 12), np.float32))
    x = np.random.default_rng(0).uniform(0.1, 2, (5, 12)).astype(np.float32)
    [found] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    expected = np.asarray(function(jnp.asarray(x)))
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("function", "name"), [
    (lambda x: jnp.sort(x, axis=1), "sort"),
    (lambda x: jnp.einsum("bi,bj->bij", x, x).reshape(x.shape[0], -1), "dot_general"),
    (lambda x: jax.lax.scan(lambda carry, y: (carry + y, y), x, jnp.ones((3, 1)))[0], "scan"),
    (lambda x: jax.lax.cond(x.sum().astype(bool), jnp.sin, jnp.cos, x), "cond"),
    (lambda x: x + jnp.broadcast_to(jnp.float32(2), (x.shape[0], 12)), "broadcast_in_dim"),
])  # fmt: skip
def test_operation_without_a_translation_is_named_and_nothing_written(
    function: Callable[[jax.Array], jax.Array], name: str, tmp_path: Path
) -> None:
    [batch] = export.symbolic_shape("n")
    like = jax.ShapeDtypeStruct((batch, 12), np.float32)
    assert f"JAX's operation {name} " in write_onnx(tmp_path / "p", lambda x: {"y": function(x)}, like)
    assert not (tmp_path / "p").exists()


# The check ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outputs", "message"), [
    ({"action": ACTION + 1.1e-5, "value": VALUE}, "^f .*action by 1.1e-05"),
    ({"action": ACTION, "value": VALUE + np.array([0, 0.004])}, "value by 1.3e-05"),
    ({"action": ACTION, "value": VALUE * np.nan}, "value by nan"),
    ({"action": ACTION}, r"f has no output value of shape \(2,\)"),
    ({"action": ACTION[:1], "value": VALUE}, r"f has no output action of shape \(2, 3\)"),
])  # fmt: skip
def test_difference_beyond_rounding_is_one_line_of_error(outputs: dict[str, np.ndarray], message: str) -> None:
    check_outputs("f", {"action": ACTION + 9e-6, "value": VALUE + 2.9e-3}, {"action": ACTION, "value": VALUE})
    with pytest.raises(RunError, match=message):
        check_outputs("f", outputs, {"action": ACTION, "value": VALUE})


def test_programs_of_a_policy_without_numbers_are_refused() -> None:
    with pytest.raises(RunError, match="value by nan"):
        check_outputs("f", {"value": VALUE * np.nan}, {"value": VALUE * np.nan})


def test_either_of_two_actions_of_equal_value_is_accepted() -> None:
    expected = {"action": np.array([0, 2]), "q_values": Q_VALUES}
    check_outputs("f", {"action": np.array([1, 2]), "q_values": Q_VALUES}, expected)
    with pytest.raises(RunError, match="action by"):
        check_outputs("f", {"action": np.array([0, 1]), "q_values": Q_VALUES}, expected)
