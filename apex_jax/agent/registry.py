"""Which algorithms there are. A new one is a file that makes an `Algorithm`, and a line of ALGORITHMS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.dqn import make_dqn
from apex_jax.config import Config
from apex_jax.errors import UsageError
from apex_jax.types import SegmentSpec


class Entry(NamedTuple):
    """An algorithm, and the actions that it can choose."""

    make: Callable[[Config, SegmentSpec, Any], Algorithm]  # the last argument: dtype of the network's activations
    action_dtype: str  # of `ActionSpec`


ALGORITHMS: dict[str, Entry] = {
    "dqn": Entry(make_dqn, "int32"),
}
"""By `algorithm.name`; "auto" is the first whose actions are the environment's."""


def make_algorithm(config: Config, spec: SegmentSpec, compute_dtype: Any = jnp.float32) -> Algorithm:
    """Returns the algorithm of this configuration; UsageError if there is none, or not for this environment.

    `compute_dtype`: of the network's activations.
    """
    name, fitting = config.algorithm.name, [n for n, e in ALGORITHMS.items() if e.action_dtype == spec.action.dtype]
    if name == "auto" and fitting:
        name = fitting[0]
    if name not in fitting:
        choice = ", ".join(["auto", *fitting])
        raise UsageError(
            f"algorithm.name={name}: for the actions of {config.environment.task} it must be one of {choice}"
        )
    return ALGORITHMS[name].make(config, spec, compute_dtype)
