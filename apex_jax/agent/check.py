"""Checks an algorithm or network of the user before anything starts: JAX traces its functions, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.algorithm import Action, Algorithm
from apex_jax.agent.frame_store import create_store
from apex_jax.agent.registry import make_algorithm
from apex_jax.config import Config
from apex_jax.config.trust import code_settings
from apex_jax.host.errors import UsageError
from apex_jax.host.user_code import imported_names, place_of, reported
from apex_jax.types import SegmentSpec

OBSERVATIONS, UPDATES = 3, 2  # N or B, and K, in the traced calls


def check_user_code(config: Config, spec: SegmentSpec, is_tag: Callable[[str], bool] = str.isascii) -> None:
    """Raises UsageError, with file and line, if `algorithm.name` or `network.name` names code that cannot learn.

    Its functions must match the shapes and dtypes of `Algorithm`; `is_tag`: whether metrics of a tag can be written.
    """
    for key, value in code_settings(config).items():
        if key != "environment.task":
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
    observation = array(OBSERVATIONS, spec.frame_stack, *spec.frame_shape, dtype=spec.frame_dtype)
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
            yield f"update returned the metric {tag}, must be own/{tag.rpartition('/')[2]} or one of docs/metrics.md"


def _differences(function: str, found: Any, expected: Any, what: str = "") -> Iterator[str]:
    if _text(found) != _text(expected):
        yield f"{function} returned {what}{_text(found)}, must be {_text(expected)}"


def _text(tree: Any) -> str:
    """Returns the shapes and dtypes of arrays, such as "float32[3,2]"."""
    leaves, structure = jax.tree.flatten(tree)
    texts = [f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in leaves]
    return texts[0] if leaves == [tree] else str(jax.tree.unflatten(structure, texts))
