"""A trained policy as one function of observations, with its params as constants: what `jax.export` needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import export

from apex_jax.agent.algorithm import Params
from apex_jax.host.errors import RunError, first_line
from apex_jax.types import EnvironmentSpec, Observation, Part, StackSpec, map_parts

Outputs: TypeAlias = dict[str, jax.Array]  # "action" and values by name, each with the batch as its first axis


def observation_shape(part: StackSpec) -> tuple[int, ...]:
    """Returns the shape of a part of one observation: [F, *O], or *O if the agent sees single frames."""
    return (part.stack, *part.shape) if part.stack > 1 else part.shape


def policy_function(
    greedy: Callable[[Params, Observation], Outputs], params: Params, environment_spec: EnvironmentSpec
) -> Callable[[Observation], Outputs]:
    """Returns a jitted function: observations [N, *observation_shape] -> the outputs of `Algorithm.greedy`.

    Actions are int32[N], the environment's own numbers, or int32[N, ...] of several discrete parts, or float32[N, A]
    within its bounds.
    """
    spec = environment_spec.spec

    def stacks(part: StackSpec, array: jax.Array) -> jax.Array:
        return jnp.reshape(array, (-1, part.stack, *part.shape))

    def act(observation: Observation) -> Outputs:
        outputs = greedy(params, map_parts(stacks, spec.observation, observation))
        if environment_spec.low is not None and environment_spec.high is not None:
            low, high = jnp.array(environment_spec.low), jnp.array(environment_spec.high)
            outputs = outputs | {"action": low + (outputs["action"] + 1) / 2 * (high - low)}
        elif environment_spec.action_part is not None:
            outputs = outputs | {"action": _parts_of(outputs["action"], environment_spec.action_part)}
        elif environment_spec.first_action:
            outputs = outputs | {"action": outputs["action"] + environment_spec.first_action}
        return outputs

    return jax.jit(act)


def _parts_of(numbers: jax.Array, part: Part) -> jax.Array:
    """Returns actions int32[N] as arrays int32[N, *part.shape], see `EnvironmentSpec.scaled`."""
    parts: list[jax.Array] = []
    for count in reversed(part.counts):  # with operations that the ONNX export knows
        quotient = jax.lax.div(numbers, jnp.int32(count))
        parts.insert(0, jnp.reshape(numbers - count * quotient, (numbers.shape[0], 1)))
        numbers = quotient
    joined = jnp.concatenate(parts, axis=1) + jnp.array(part.starts, jnp.int32)
    return joined.reshape(joined.shape[0], *part.shape)


def for_any_batch(function: Callable[[Observation], Outputs], like: Observation) -> Callable[[Observation], Outputs]:
    """Returns a function of observations as `like`, whose batch size is unknown, that computes the same as `function`.

    A network that needs the size as a number, such as for `len(x)`, is traced with one observation, and this trace is
    mapped over the batch. Raises RunError if that fails, too.
    """
    for candidate in (function, jax.jit(jax.vmap(partial(_of_one, function)))):
        try:
            jax.eval_shape(candidate, like)
        except Exception as error:  # of any type: the code of a user's network raises it
            problem = first_line(error)
        else:
            return candidate
    raise RunError(f"the network cannot be traced for a batch of any size: {problem}; nothing is written")


def _of_one(function: Callable[[Observation], Outputs], observation: Observation) -> Outputs:
    outputs = function(jax.tree.map(lambda x: x[None], observation))
    return jax.tree.map(lambda x: x[0], outputs)


def any_batch(environment_spec: EnvironmentSpec) -> Observation:
    """Returns the shapes and dtypes of the observations of a batch whose size is not known."""
    [batch] = export.symbolic_shape("batch")
    return map_parts(
        lambda part: jax.ShapeDtypeStruct((batch, *observation_shape(part)), part.dtype),
        environment_spec.spec.observation,
    )
