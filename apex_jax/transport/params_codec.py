"""Params of a network as bytes: float32 leaves in tree order, checked before use."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import jax
import numpy as np

from apex_jax.host.errors import UsageError
from apex_jax.segment_codec import FLOAT32, Bytes
from apex_jax.types import MAX_WEIGHTS_BYTES


def architecture_of(params: Any) -> str:
    """Returns the digest of a tree's key paths and shapes; networks with equal digests can exchange params.

    Leaves are arrays or `jax.ShapeDtypeStruct`. Raises ValueError for a leaf that is not float32, UsageError for a
    network that is too large to be sent.
    """
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if leaf.dtype != FLOAT32:
            raise ValueError(f"weights{name} is {leaf.dtype}, not float32: weights travel as float32 only")
        lines.append(f"{name} {tuple(leaf.shape)}")
    num_bytes = FLOAT32.itemsize * sum(leaf.size for leaf in jax.tree.leaves(params))
    if num_bytes > MAX_WEIGHTS_BYTES:
        most = f"{MAX_WEIGHTS_BYTES >> 20} can be sent"
        what = f"the network has {num_bytes >> 20:,} MiB of parameters, of which {most}"
        raise UsageError(f"{what}; lower network.hidden_units or network.channels, or use larger network.strides")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def encode_weights(params: Any) -> bytes:
    """Returns the float32 leaves, concatenated in tree order."""
    leaves = jax.tree_util.tree_leaves(params)
    return b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in leaves)


def decode_weights(body: Bytes, like_params: Any) -> Any:
    """Returns a tree like `like_params` (arrays or `jax.ShapeDtypeStruct`) of read-only NumPy views of `body`.

    Raises ValueError if the length of `body` does not match. The caller has checked that the architectures match.
    """
    likes, tree = jax.tree_util.tree_flatten(like_params)
    sizes = [math.prod(like.shape) for like in likes]
    data = memoryview(body).toreadonly()
    if data.nbytes != FLOAT32.itemsize * sum(sizes):
        raise ValueError(f"{data.nbytes} bytes of weights, but this network has {FLOAT32.itemsize * sum(sizes)}")
    leaves = np.split(np.frombuffer(data, FLOAT32), np.cumsum(sizes)[:-1])
    shaped = [leaf.reshape(like.shape) for leaf, like in zip(leaves, likes, strict=True)]
    return jax.tree_util.tree_unflatten(tree, shaped)
