"""The algorithms by name. A new algorithm is a module that makes an `Algorithm`, and a line in ALGORITHMS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.dpg import make_dpg
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.estimator import OPTIONS
from apex_jax.config import Config
from apex_jax.host.errors import UsageError, short_repr
from apex_jax.types import SegmentSpec


class Entry(NamedTuple):
    """An algorithm and the dtype of the actions that it chooses."""

    make: Callable[[Config, SegmentSpec, Any], Algorithm]  # third argument: dtype of the activations
    action_dtype: str  # as in `ActionSpec`


ALGORITHMS: dict[str, Entry] = {
    "dqn": Entry(make_dqn, "int32"),
    "dpg": Entry(make_dpg, "float32"),
}
"""By `algorithm.name`; a program may add its own, as examples/own_algorithm.py does.

"auto" selects the first one whose `action_dtype` is that of the environment.
"""


def make_algorithm(config: Config, spec: SegmentSpec, compute_dtype: Any = jnp.float32) -> Algorithm:
    """Returns the algorithm of this configuration; `compute_dtype` is the dtype of the network's activations.

    Raises UsageError, see `resolved`.
    """
    return ALGORITHMS[resolved(config, spec).algorithm.name].make(config, spec, compute_dtype)


def resolved(config: Config, spec: SegmentSpec) -> Config:
    """Returns the configuration with the name of an algorithm in place of "auto".

    Raises UsageError if no algorithm has this name, if it cannot choose the actions of this environment, or if an
    option of DQN is on and it is DPG.
    """
    name, fitting = config.algorithm.name, [n for n, e in ALGORITHMS.items() if e.action_dtype == spec.action.dtype]
    if name == "auto" and fitting:
        name = fitting[0]
    if name not in fitting:
        choice = ", ".join(["auto", *fitting])
        raise UsageError(
            f"algorithm.name={name}: for the actions of {config.environment.task} it must be one of {choice}"
        )
    for option in OPTIONS if name == "dpg" else ():
        if value := getattr(config.algorithm, option):
            raise UsageError(f"algorithm.{option}={short_repr(value)}: is an option of DQN, not of DPG; leave it out")
    return config.replace(algorithm=replace(config.algorithm, name=name))
