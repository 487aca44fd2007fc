"""The algorithms by name: those of this package, and the user's, `algorithm.name=MODULE:FUNCTION`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp

from apex_jax.agent.algorithm import Algorithm, State, UpdateOutput
from apex_jax.agent.dpg import make_dpg
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.estimator import OPTIONS
from apex_jax.agent.frame_store import Array, FrameStore
from apex_jax.config import Config
from apex_jax.config.key import names_code
from apex_jax.host.errors import UsageError, short_repr
from apex_jax.host.user_code import imported_names, reported
from apex_jax.types import SegmentSpec

Make: TypeAlias = Callable[[Config, SegmentSpec, Any], Algorithm]  # third argument: dtype of the activations


class Entry(NamedTuple):
    """An algorithm and the dtype of the actions that it chooses."""

    make: Make
    action_dtype: str  # as in `ActionSpec`


ALGORITHMS: dict[str, Entry] = {
    "dqn": Entry(make_dqn, "int32"),
    "dpg": Entry(make_dpg, "float32"),
}
"""By `algorithm.name`. "auto" selects the first one whose `action_dtype` is that of the environment."""


def make_algorithm(config: Config, spec: SegmentSpec, compute_dtype: Any = jnp.float32) -> Algorithm:
    """Returns the algorithm of this configuration; `compute_dtype` is the dtype of the network's activations.

    Runs in one process that differ only in seed, directory and learning rate share their compiled programs. Imports the
    user's module if `algorithm.name` or `network.name` names one. Raises UsageError, see `resolved` and
    `imported_names`; also if a function of the user's fails.
    """
    name = resolved(config, spec).algorithm.name
    if not names_code(name):
        make = ALGORITHMS[name].make
        if names_code(config.network.name):  # whose class may have changed
            return make(config, spec, compute_dtype)
        learner = replace(config.learner, learning_rate=1.0)
        shared = _shared(make, config.replace(seed=0, run_directory="", learner=learner), spec, compute_dtype)
        return _at_learning_rate(config.learner.learning_rate, shared)
    [make] = imported_names("algorithm.name", name)
    with reported(f"algorithm.name={name}", UsageError, make):
        algorithm = make(config, spec, compute_dtype)
        if not isinstance(algorithm, Algorithm):
            raise TypeError(f"returned {type(algorithm).__name__}, not an Algorithm")
        return algorithm


@lru_cache(maxsize=4)
def _shared(make: Make, config: Config, spec: SegmentSpec, compute_dtype: Any) -> Algorithm:
    return make(config, spec, compute_dtype)


def _at_learning_rate(learning_rate: float, algorithm: Algorithm) -> Algorithm:
    """Returns an algorithm that was made with a learning rate of 1 at another one, which no program contains."""

    def update(
        state: State, store: FrameStore, indices: Array, weights: Array, learning_rate_share: float
    ) -> tuple[State, UpdateOutput]:
        return algorithm.update(state, store, indices, weights, learning_rate * learning_rate_share)

    return algorithm._replace(update=update)


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
