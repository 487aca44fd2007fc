"""Specifications and parameters that tests of agents share."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from apex_jax.types import ActionSpec, SegmentSpec
from tests.rigs import reference

PIXELS = SegmentSpec(
    frame_shape=(84, 84), frame_dtype="uint8", frame_stack=4, slots=16, n_step=3, action=ActionSpec.discrete(6)
)


def twin_params(params: Any) -> reference.Arrays:
    """Returns the parameters as the twin names them; the agent keeps both hidden layers in one matrix."""
    layers = {
        name: jax.tree.map(lambda x: np.asarray(x, np.float64), layer) for name, layer in params["params"].items()
    }
    hidden = layers.pop("hidden")
    for part in ("kernel", "bias"):
        value, advantage = np.split(hidden[part], 2, axis=-1)
        layers.setdefault("value_hidden", {})[part] = value
        layers.setdefault("advantage_hidden", {})[part] = advantage
    return {f"{name}/{part}": array for name, layer in layers.items() for part, array in layer.items()}


def flat_params(params: Any) -> reference.Arrays:
    """Returns the parameters of one network in float64, named by their path: "torso/Dense_0/kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(params["params"])
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x, np.float64) for path, x in leaves}


CONTINUOUS = ActionSpec((3,), "float32", -1.0, 1.0)


def assert_equal_bits(tree: Any, expected: Any) -> None:
    """Fails unless two trees have the same structure, and leaves of the same dtypes, shapes and bytes."""

    def compare(leaf: Any, other: Any) -> None:
        assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()

    jax.tree.map(compare, tree, expected)  # which raises if their structures differ
