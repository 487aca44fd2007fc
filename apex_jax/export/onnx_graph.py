"""A traced function of JAX as an ONNX graph, for the operations of the networks of this package.

The graph is made from the jaxpr, which is what JAX itself compiles, so that a changed network needs no second
description. Converters such as jax2onnx know far more operations, but pin other versions of JAX's libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import onnx
from jax.extend import core
from onnx import helper, numpy_helper

OPSET = 18  # of 2022: every ONNX Runtime from 1.14 on has it
IR_VERSION = 8  # the file format of that time
ALIKE = ("add", "sub", "mul", "div", "pow", "max", "min", "neg", "exp", "log", "sqrt", "abs", "tanh")
ELEMENTWISE = {name: name.capitalize() for name in ALIKE} | {"logistic": "Sigmoid", "stop_gradient": "Identity"}
"""By the name of the primitive. Both broadcast as NumPy does."""
CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
"""Primitives that compute one function once, and their parameter with it; loops also have one."""

Value: TypeAlias = "np.ndarray | str"  # a constant, or the name of a value that the graph computes


class UnsupportedError(Exception):
    """The function has an operation that has no translation here; the message names it."""


def onnx_model(function: Callable[..., dict[str, jax.Array]], input_name: str, like: Any) -> Any:
    """Returns the `onnx.ModelProto` of a function of one array, or a dict of arrays, whose first axis may be symbolic.

    `input_name`: of one array; those of a dict have its keys. Its outputs have the names of the function's. Raises
    UnsupportedError.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(like)
    graph = _Graph()
    inputs = like if isinstance(like, dict) else {input_name: like}
    values = graph.run(closed.jaxpr, closed.consts, sorted(inputs))  # JAX sorts the names of a dict
    outputs = {}
    for name, value in zip(sorted(shapes), values, strict=True):
        graph.nodes.append(helper.make_node("Identity", [graph.name_of(value)], [name]))
        outputs[name] = _described(name, shapes[name])
    described = [_described(name, inputs[name]) for name in sorted(inputs)]
    made = helper.make_graph(graph.nodes, "policy", described, list(outputs.values()), graph.stored)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="apex_jax")
    model.ir_version = IR_VERSION
    onnx.checker.check_model(model, full_check=True)
    return model


def _described(name: str, array: Any) -> Any:
    shape = [size if isinstance(size, int) else str(size) for size in array.shape]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(array.dtype)), shape)


class _Graph:
    """Nodes and constants of a graph that is being made."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.stored: list[Any] = []  # the constants
        self._count = 0

    def run(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Value]) -> list[Value]:
        """Appends the operations of a jaxpr; returns the values of its outputs."""
        known: dict[Any, Value] = dict(zip(jaxpr.constvars, map(np.asarray, constants), strict=True))
        known |= dict(zip(jaxpr.invars, arguments, strict=True))

        def value_of(variable: Any) -> Value:
            if isinstance(variable, core.Literal):
                return np.asarray(variable.val, variable.aval.dtype)  # type: ignore[attr-defined]
            return known[variable]

        for equation in jaxpr.eqns:
            results = self._apply(equation, [value_of(variable) for variable in equation.invars])
            known |= dict(zip(equation.outvars, results, strict=True))
        return [value_of(variable) for variable in jaxpr.outvars]

    def _apply(self, equation: Any, values: list[Value]) -> list[Value]:
        name = equation.primitive.name
        if name in CALLS:
            inner = equation.params[CALLS[name]]
            return self.run(inner.jaxpr, inner.consts, values)
        is_sized = all(isinstance(size, int) for variable in equation.outvars for size in variable.aval.shape)
        if is_sized and all(isinstance(value, np.ndarray) for value in values):
            results = equation.primitive.bind(*values, **equation.params)
            return [np.asarray(each) for each in (results if equation.primitive.multiple_results else [results])]
        if name in ELEMENTWISE:
            return [self.node(ELEMENTWISE[name], *values)]
        if name not in TRANSLATIONS:
            raise UnsupportedError(f"JAX's operation {name} has no translation to ONNX here")
        return TRANSLATIONS[name](self, equation, *values)

    def node(self, operation: str, *inputs: Value, **attributes: Any) -> str:
        """Appends an operation with one output; returns the name of the output."""
        return self.nodes_of(operation, 1, *inputs, **attributes)[0]

    def nodes_of(self, operation: str, outputs: int, *inputs: Value, **attributes: Any) -> list[str]:
        """Appends an operation; returns the names of its outputs."""
        names = [self._new_name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(operation, [self.name_of(each) for each in inputs], names, **attributes))
        return names

    def name_of(self, value: Value) -> str:
        """Returns the name of a value; a constant is stored."""
        if isinstance(value, str):
            return value
        name = self._new_name()
        self.stored.append(numpy_helper.from_array(np.asarray(value, order="C"), name))
        return name

    def transposed(self, value: Value, axes: Sequence[int]) -> Value:
        """Returns the value with its axes in another order."""
        if isinstance(value, np.ndarray):
            return np.transpose(value, axes)
        return self.node("Transpose", value, perm=list(axes))

    def _new_name(self) -> str:
        self._count += 1
        return f"v{self._count}"


# Each translation takes the graph, an equation and the values of its inputs; it returns the values of its outputs.


def _reshape(graph: _Graph, equation: Any, value: Value) -> list[Value]:
    """At most one size may be symbolic: ONNX computes it from the number of elements."""
    sizes = [size if isinstance(size, int) else -1 for size in equation.outvars[0].aval.shape]
    return [graph.node("Reshape", value, np.array(sizes, np.int64))]


def _broadcast(graph: _Graph, equation: Any, value: Value) -> list[Value]:
    before, after = equation.invars[0].aval.shape, equation.params["shape"]
    axes = {after_axis: before[axis] for axis, after_axis in enumerate(equation.params["broadcast_dimensions"])}
    if not all(isinstance(size, int) or axis in axes for axis, size in enumerate(after)):
        raise UnsupportedError("JAX's operation broadcast_in_dim to a batch has no translation to ONNX here")
    sizes = [axes.get(axis, 1) for axis in range(len(after))]
    shape = np.array([size if isinstance(size, int) else -1 for size in sizes], np.int64)
    value = graph.node("Reshape", value, shape)
    if sizes == list(after):
        return [value]
    # ONNX leaves an axis as it is if 1 is asked for.
    return [graph.node("Expand", value, np.array([size if isinstance(size, int) else 1 for size in after], np.int64))]


def _matrix_product(graph: _Graph, equation: Any, left: Value, right: Value) -> list[Value]:
    if equation.params["dimension_numbers"] != (((1,), (0,)), ((), ())) or len(equation.invars[1].aval.shape) != 2:
        raise UnsupportedError("JAX's operation dot_general of other than two matrices has no translation to ONNX here")
    return [graph.node("MatMul", left, right)]


def _convolution(graph: _Graph, equation: Any, image: Value, kernel: Value) -> list[Value]:
    params = equation.params
    if params["batch_group_count"] != 1 or set(params["lhs_dilation"]) != {1}:
        raise UnsupportedError(
            "JAX's operation conv_general_dilated of a dilated input has no translation to ONNX here"
        )
    axes = params["dimension_numbers"]  # of batch and channel, then height and width
    made = graph.node(
        "Conv",
        graph.transposed(image, axes.lhs_spec),
        graph.transposed(kernel, axes.rhs_spec),
        strides=list(params["window_strides"]),
        dilations=list(params["rhs_dilation"]),
        pads=[size for sizes in zip(*params["padding"], strict=True) for size in sizes],
        group=params["feature_group_count"],
    )
    return [graph.transposed(made, np.argsort(axes.out_spec).tolist())]


def _cast(graph: _Graph, equation: Any, value: Value) -> list[Value]:
    return [graph.node("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(equation.outvars[0].aval.dtype)))]


def _reduction(operation: str) -> Callable[..., list[Value]]:
    def reduce(graph: _Graph, equation: Any, value: Value) -> list[Value]:
        return [graph.node(operation, value, np.array(equation.params["axes"], np.int64), keepdims=0)]

    return reduce


def _arg_max(graph: _Graph, equation: Any, value: Value) -> list[Value]:
    [axis] = equation.params["axes"]
    return _cast(graph, equation, graph.node("ArgMax", value, axis=axis, keepdims=0))


def _split(graph: _Graph, equation: Any, value: Value) -> list[Value]:
    sizes = np.array(equation.params["sizes"], np.int64)
    return list(graph.nodes_of("Split", len(sizes), value, sizes, axis=equation.params["axis"]))


def _power(graph: _Graph, equation: Any, value: Value) -> list[Value]:
    return [graph.node("Pow", value, np.array(equation.params["y"], equation.outvars[0].aval.dtype))]


def _rsqrt(graph: _Graph, equation: Any, value: Value) -> list[Value]:
    return [graph.node("Reciprocal", graph.node("Sqrt", value))]


TRANSLATIONS: dict[str, Callable[..., list[Value]]] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "broadcast_in_dim": _broadcast,
    "transpose": lambda graph, equation, value: [graph.transposed(value, equation.params["permutation"])],
    "convert_element_type": _cast,
    "dot_general": _matrix_product,
    "conv_general_dilated": _convolution,
    "reduce_sum": _reduction("ReduceSum"),
    "reduce_max": _reduction("ReduceMax"),
    "argmax": _arg_max,
    "split": _split,
    "concatenate": lambda graph, equation, *values: [graph.node("Concat", *values, axis=equation.params["dimension"])],
    "square": lambda graph, equation, value: [graph.node("Mul", value, value)],
    "integer_pow": _power,
    "rsqrt": _rsqrt,
}
"""By the name of the primitive, beside ELEMENTWISE."""
