"""The algorithms by name: those of this package, and the user's, `algorithm.name=MODULE:FUNCTION`, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.algorithm import Action, Algorithm, State, UpdateOutput
from apex_jax.agent.dpg import make_dpg
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.estimator import OPTIONS
from apex_jax.agent.frame_store import Array, FrameStore, create_store
from apex_jax.config import Config
from apex_jax.config.keys import names_code
from apex_jax.config.load import code_settings
from apex_jax.host.errors import UsageError, short_repr
from apex_jax.host.user_code import imported_names, place_of, reported
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


# Checks of an algorithm or network of the user: JAX traces its functions, and computes nothing ------------------------


OBSERVATIONS, UPDATES = 3, 2  # N or B, and K, in the traced calls


def check_user_code(config: Config, spec: SegmentSpec, is_tag: Callable[[str], bool] = str.isascii) -> None:
    """Raises UsageError, with file and line, if `algorithm.name` or `network.name` names code that cannot learn.

    Its functions must match the shapes and dtypes of `Algorithm`; `is_tag`: whether metrics of a tag can be written.
    """
    for key, value in code_settings(config).items():
        if not key.startswith("environment."):
            code = imported_names(key, value)[0]
            with reported(f"{key}={value}", UsageError, code):
                problem = next(_problems(make_algorithm(config, spec), spec, is_tag), None)
            if problem:
                raise UsageError(f"{key}={value}: {problem} ({place_of(code)})")


def _problems(algorithm: Algorithm, spec: SegmentSpec, is_tag: Callable[[str], bool]) -> Iterator[str]:
    """Yields a message for each shape, dtype or tag that breaks the interface `Algorithm`."""

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    key = jax.random.key(0)
    state = jax.eval_shape(algorithm.init, key)
    params = jax.eval_shape(algorithm.acting_params, state)
    observation = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, spec.zeros(OBSERVATIONS)))
    action = array(OBSERVATIONS, *spec.action.shape, dtype=spec.action.dtype)
    per_observation = array(OBSERVATIONS)
    output = jax.eval_shape(algorithm.act, params, observation, per_observation, key, 0)
    for name, found, expected in zip(Action._fields, output, (action, per_observation, per_observation), strict=True):
        yield from _differences("act", found, expected, f"{name} ")

    if algorithm.greedy is not None:
        chosen = jax.eval_shape(algorithm.greedy, params, observation)
        yield from _differences("greedy", chosen["action"], action)
        if "q_values" in chosen:  # an argmax hides the number of actions
            expected = array(OBSERVATIONS, spec.action.num_actions)
            yield from _differences("greedy", chosen["q_values"], expected, "q-values ")

    exploration = np.asarray(algorithm.exploration(OBSERVATIONS))
    yield from _differences("exploration", exploration, per_observation)

    store, batches = jax.eval_shape(lambda: create_store(spec, 2)), (UPDATES, OBSERVATIONS)
    indices, weights = array(*batches, dtype=jnp.int32), array(*batches)
    new_state, update = jax.eval_shape(algorithm.update, state, store, indices, weights, array())
    yield from _differences("update", new_state, state, "the state ")
    yield from _differences("update", update.priorities, weights, "priorities ")
    for tag, metric in update.metrics.items():
        yield from _differences("update", metric, array(UPDATES), f"the metric {tag} ")
        if not is_tag(tag):
            yield f"update returned the metric {tag}, must be own/{tag.rpartition('/')[2]} or one of this program"


def _differences(function: str, found: Any, expected: Any, what: str = "") -> Iterator[str]:
    if _text(found) != _text(expected):
        yield f"{function} returned {what}{_text(found)}, must be {_text(expected)}"


def _text(tree: Any) -> str:
    """Returns the shapes and dtypes of arrays, such as "float32[3,2]"."""
    leaves, structure = jax.tree.flatten(tree)
    texts = [f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in leaves]
    return texts[0] if leaves == [tree] else str(jax.tree.unflatten(structure, texts))
