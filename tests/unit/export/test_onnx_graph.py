"""Specification of ONNX graphs: each operation computes what JAX does, or is named if it has no translation."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from jax import export

from apex_jax.export.onnx_graph import UnsupportedError, onnx_model

CONSTANT = np.linspace(-1, 2, 12, dtype=np.float32)
KERNEL = jnp.array(CONSTANT[:8].reshape(2, 1, 2, 2))


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
def test_an_operation_without_a_translation_is_named(function: Callable[[jax.Array], jax.Array], name: str) -> None:
    [batch] = export.symbolic_shape("n")
    with pytest.raises(UnsupportedError, match=f"JAX's operation {name} .*has no translation to ONNX here"):
        onnx_model(lambda x: {"y": function(x)}, "x", jax.ShapeDtypeStruct((batch, 12), np.float32))
