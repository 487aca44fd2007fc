"""Specification of exported programs: they compute the same where there is no apex_jax, and ONNX is optional."""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from apex_jax.agent.policy_function import any_batch, policy_function
from apex_jax.export.check import check_outputs
from apex_jax.export.programs import ONNX, STABLEHLO, run_onnx, run_stablehlo, write_onnx, write_stablehlo
from tests.rigs.exported import KINDS, agent_of, observations_of, outputs_elsewhere

QUICK = ("pixels in stacks", "a vector, all options", "continuous, normalized")
every_kind = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.long, id=kind) for kind in KINDS]


@pytest.mark.parametrize("kind", every_kind)
def test_a_process_without_apex_jax_computes_the_same_from_either_file(kind: str, tmp_path: Path) -> None:
    agent = agent_of(kind)
    assert agent.algorithm.greedy is not None
    function, like = (
        policy_function(agent.algorithm.greedy, agent.params, agent.environment_spec),
        any_batch(agent.environment_spec),
    )
    write_stablehlo(tmp_path / STABLEHLO, function, like)
    assert write_onnx(tmp_path / ONNX, function, like) == ""
    for count in (1, 9):
        observations = observations_of(agent.environment_spec, count)
        expected = {name: np.asarray(each) for name, each in function(observations).items()}  # type: ignore[arg-type]
        here = [run_stablehlo(tmp_path / STABLEHLO, observations), run_onnx(tmp_path / ONNX, observations)]
        assert [{name: x.dtype for name, x in found.items()} for found in here] == [
            {name: x.dtype for name, x in expected.items()}
        ] * 2
        for outputs in (*here, *(outputs_elsewhere(tmp_path, observations) if count > 1 else ())):
            assert set(outputs) == set(expected)
            check_outputs("a program", outputs, expected, agent.environment_spec.first_action)


def test_the_stablehlo_is_for_cpu_and_cuda_and_multiplies_in_float32(tmp_path: Path) -> None:
    agent = agent_of("a vector")
    assert agent.algorithm.greedy is not None
    function = policy_function(agent.algorithm.greedy, agent.params, agent.environment_spec)
    write_stablehlo(tmp_path / "p", function, any_batch(agent.environment_spec))
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


def test_a_function_without_a_translation_is_not_written_and_the_reason_returned(tmp_path: Path) -> None:
    problem = write_onnx(tmp_path / "p", lambda x: {"y": jnp.sort(x)}, any_batch(agent_of("a vector").environment_spec))
    assert "operation sort" in problem
    assert not (tmp_path / "p").exists()
