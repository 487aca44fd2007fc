"""A policy as programs that run without this package: StableHLO for JAX, and ONNX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from apex_jax.agent.policy_function import Outputs
from apex_jax.host.program import CHECKOUT

STABLEHLO = "policy.stablehlo"
ONNX = "policy.onnx"
INPUT = "observation"  # name of the input in ONNX, whose inputs are passed by name
PLATFORMS = ("cpu", "cuda")  # the StableHLO is lowered for both, which needs no GPU
INSTALL_ONNX = "pip install " + ("-r requirements-export.txt" if CHECKOUT else "'apex-jax[export]'")


def write_stablehlo(path: Path, function: Any, like: jax.ShapeDtypeStruct) -> None:
    """Writes a jitted function of observations as `jax.export` serializes it. Raises OSError."""
    # Without the folders of this machine, which the source locations in the file would name.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    with jax.default_matmul_precision("highest"):  # a GPU would multiply with 10 bits (TF32), and miss the tolerance
        exported = export.export(function, platforms=PLATFORMS)(like)
    path.write_bytes(exported.serialize())


def run_stablehlo(path: Path, observations: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the outputs of a file for a batch of observations."""
    outputs = export.deserialize(bytearray(path.read_bytes())).call(observations)
    return {name: np.asarray(output) for name, output in outputs.items()}


def write_onnx(path: Path, function: Callable[[jax.Array], Outputs], like: jax.ShapeDtypeStruct) -> str:
    """Writes a function as an ONNX model; or returns, on one line, why it cannot be. Raises OSError."""
    try:
        from apex_jax.export.onnx_graph import UnsupportedError, onnx_model  # imported here: onnx is optional
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        return f"the package onnx is not installed: {INSTALL_ONNX}"
    try:
        path.write_bytes(onnx_model(function, INPUT, like).SerializeToString())
    except UnsupportedError as error:
        return str(error)
    return ""


def run_onnx(path: Path, observations: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the outputs of a file for a batch of observations, by ONNX's own reference implementation."""
    from onnx.reference import ReferenceEvaluator  # imported here: onnx is optional

    evaluator = ReferenceEvaluator(str(path))
    return dict(zip(evaluator.output_names, evaluator.run(None, {INPUT: observations}), strict=True))
