"""Params in the safetensors format, which the Hugging Face hub and other libraries read; no code is in it, only arrays.

A leaf has the name of its path in the tree, such as `policy.params.torso.Dense_0.kernel`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from apex_jax.host.disk import open_regular
from apex_jax.host.errors import RunError, first_line, short_repr

FILE_NAME = "model.safetensors"
CHECKSUM = "params_crc32"  # name of a file's text with the CRC-32 of its arrays, in the order of their names
FIX = "copy it again, or export the run again"


def save_params(path: Path, params: Any, metadata: Mapping[str, str]) -> None:
    """Writes the arrays of a tree, texts about them, and a checksum of the arrays. Raises OSError."""
    leaves = {name: np.asarray(leaf, order="C") for name, leaf in _named_leaves(params).items()}
    path.write_bytes(save(leaves, {**metadata, CHECKSUM: _checksum(leaves)}))


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the texts of a file. Raises RunError if it is damaged or no file of params."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


def load_params(path: Path, like_params: Any) -> Any:
    """Returns a tree like `like_params` (arrays or `jax.ShapeDtypeStruct`) of NumPy arrays.

    Raises RunError if the file is damaged, or if the names, shapes or dtypes of its arrays differ.
    """
    likes, metadata = _named_leaves(like_params), read_metadata(path)
    with _opened(path) as file:
        try:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except Exception as error:  # such as a dtype that NumPy lacks
            raise RunError(f"{path} cannot be read: {first_line(error)}; {FIX}") from None
    for name in sorted({*likes, *arrays}):
        was, expected = _described(arrays.get(name)), _described(likes.get(name))
        if was != expected:
            raise RunError(f"{path}: {short_repr(name)} is {was}, where this network has {expected}; {FIX}")
    if metadata.get(CHECKSUM) != _checksum(arrays):
        raise RunError(f"{path}: its parameters are not as they were written; {FIX}")
    return jax.tree.unflatten(jax.tree.structure(like_params), [arrays[name] for name in likes])


def _named_leaves(params: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    crc = 0
    for name in sorted(arrays):
        crc = zlib.crc32(arrays[name].tobytes(), crc)
    return f"{crc:08x}"


def _described(leaf: Any) -> str:
    return "missing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def _opened(path: Path) -> Any:
    """Returns the open file. Raises RunError."""
    try:
        os.close(open_regular(path, os.O_RDONLY))
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read: {first_line(error)}; {FIX}") from None
