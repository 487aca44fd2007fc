"""The algorithms by name: those of this package, and the user's, `algorithm.name=MODULE:FUNCTION`."""

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
from apex_jax.config.key import names_code
from apex_jax.host.errors import UsageError, short_repr
from apex_jax.host.user_code import imported_names, reported
from apex_jax.types import SegmentSpec


class Entry(NamedTuple):
    """An algorithm and the dtype of the actions that it chooses."""

    make: Callable[[Config, SegmentSpec, Any], Algorithm]  # third argument: dtype of the activations
    action_dtype: str  # as in `ActionSpec`


ALGORITHMS: dict[str, Entry] = {
    "dqn": Entry(make_dqn, "int32"),
    "dpg": Entry(make_dpg, "float32"),
}
"""By `algorithm.name`. "auto" selects the first one whose `action_dtype` is that of the environment."""


def make_algorithm(config: Config, spec: SegmentSpec, compute_dtype: Any = jnp.float32) -> Algorithm:
    """Returns the algorithm of this configuration; `compute_dtype` is the dtype of the network's activations.

    Imports the user's module if `algorithm.name` or `network.name` names one. Raises UsageError, see `resolved` and
    `imported_names`; also if a function of the user's fails.
    """
    name = resolved(config, spec).algorithm.name
    if not names_code(name):
        return ALGORITHMS[name].make(config, spec, compute_dtype)
    [make] = imported_names("algorithm.name", name)
    with reported(f"algorithm.name={name}", UsageError, make):
        algorithm = make(config, spec, compute_dtype)
        if not isinstance(algorithm, Algorithm):
            raise TypeError(f"returned {type(algorithm).__name__}, not an Algorithm")
        return algorithm


def resolved(config: Config, spec: SegmentSpec) -> Config:
    """Returns the configuration with the name of an algorithm in place of "auto".

    Raises UsageError if no algorithm has this name, if it cannot choose the actions of this environment, or if it is
    DPG and an option of DQN is on.
    """
    if names_code(config.algorithm.name):
        return config
    name, fitting = config.algorithm.name, [n for n, e in ALGORITHMS.items() if e.action_dtype == spec.action.dtype]
    if name == "auto" and fitting:
        name = fitting[0]
    if name not in fitting:
        choice = ", ".join(["auto", *fitting, "MODULE:FUNCTION"])
        raise UsageError(
            f"algorithm.name={name}: for the actions of {config.environment.task} it must be one of {choice}"
        )
    for option in OPTIONS if name == "dpg" else ():
        if value := getattr(config.algorithm, option):
            raise UsageError(f"algorithm.{option}={short_repr(value)}: is an option of DQN, not of DPG; leave it out")
    return config.replace(algorithm=replace(config.algorithm, name=name))
