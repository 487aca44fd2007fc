"""Params in the safetensors format, which the Hugging Face hub and other libraries read; no code is in it, only arrays.

A leaf has the name of its path in the tree, such as `policy.params.torso.Dense_0.kernel`. An exported policy is such a
file, and so are the params of a run's best evaluation, `best/model.safetensors`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from apex_jax.config import Config
from apex_jax.host.disk import open_regular, write_durably
from apex_jax.host.errors import RunError, first_line, short_repr
from apex_jax.run.environment_spec import as_record
from apex_jax.run.evaluations import FOLDER, Evaluation
from apex_jax.run.provenance import PARAMS_NAME, result_settings, write_config
from apex_jax.types import EnvironmentSpec

_log = logging.getLogger(__name__)

CHECKSUM = "params_crc32"  # name of a file's text with the CRC-32 of its arrays, in the order of their names
FIX = "copy it again, or export the run again"


def save_params(path: Path, params: Any, metadata: Mapping[str, str]) -> None:
    """Writes the arrays of a tree, texts about them, and a checksum of the arrays. Raises OSError."""
    leaves = {name: np.asarray(leaf, order="C") for name, leaf in _named_leaves(params).items()}
    write_durably(path, save(leaves, {**metadata, CHECKSUM: _checksum(leaves)}))


def metadata_of(
    config: Config, environment_spec: EnvironmentSpec, updates: int, environment_steps: int
) -> dict[str, str]:
    """Returns the texts that `load_policy` needs. `config`: as `agent.registry.resolved` returns it."""
    return {
        "format": "flax",
        "agent": config.algorithm.name,
        "task": config.environment.task,
        "updates": str(updates),
        "environment_steps": str(environment_steps),
        "interface": json.dumps(as_record(environment_spec)),
        "config": json.dumps(result_settings(config)),
    }


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


# The params of the best evaluation ------------------------------------------------------------------------------------


def keep_if_best(
    config: Config, environment_spec: EnvironmentSpec, evaluation: Evaluation, params: Any, agent: str
) -> bool:
    """Keeps these params if no evaluation of the run was as good; returns whether it did. `agent`: its algorithm.

    An error of the disk is logged, and the earlier params stay.
    """
    path = Path(config.directory, FOLDER, PARAMS_NAME)
    try:
        if _kept_return(path) >= evaluation.mean:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        write_config(config, path.parent)
        metadata = metadata_of(config, environment_spec, evaluation.updates, evaluation.environment_steps)
        save_params(path, params, metadata | {"agent": agent, "mean_return": repr(evaluation.mean)})
    except OSError as error:  # not fatal: training goes on, and the next better evaluation tries again
        _log.warning("the params of the best evaluation are not kept in %s: %s", path.parent, error)
        return False
    return True


def _kept_return(path: Path) -> float:
    """Returns the return of the kept evaluation; minus infinity if there is none, or a damaged one."""
    try:
        return float(read_metadata(path)["mean_return"])
    except (RunError, KeyError, ValueError):
        return -math.inf
