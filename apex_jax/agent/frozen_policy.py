"""A trained policy as one function of observations, with its params as constants: what `jax.export` needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import export

from apex_jax.agent.algorithm import Params
from apex_jax.types import Interface

Outputs: TypeAlias = dict[str, jax.Array]  # "action" and values by name, each with the batch as its first axis


def observation_shape(interface: Interface) -> tuple[int, ...]:
    """Returns the shape of one observation: [F, *O], or *O if the agent sees single frames."""
    spec = interface.spec
    return (spec.frame_stack, *spec.frame_shape) if spec.frame_stack > 1 else spec.frame_shape


def frozen(
    greedy: Callable[[Params, jax.Array], Outputs], params: Params, interface: Interface
) -> Callable[[jax.Array], Outputs]:
    """Returns a jitted function: observations [N, *observation_shape] -> the outputs of `Algorithm.greedy`.

    Actions are int32[N], or float32[N, A] within the bounds of the environment.
    """
    spec = interface.spec

    def act(observation: jax.Array) -> Outputs:
        outputs = greedy(params, jnp.reshape(observation, (-1, spec.frame_stack, *spec.frame_shape)))
        if interface.low is not None and interface.high is not None:
            low, high = jnp.array(interface.low), jnp.array(interface.high)
            outputs = outputs | {"action": low + (outputs["action"] + 1) / 2 * (high - low)}
        return outputs

    return jax.jit(act)


def any_batch(interface: Interface) -> jax.ShapeDtypeStruct:
    """Returns the observations of a batch whose size is not known."""
    [batch] = export.symbolic_shape("batch")
    return jax.ShapeDtypeStruct((batch, *observation_shape(interface)), interface.spec.frame_dtype)
