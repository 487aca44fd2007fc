"""Several steps of environments written in JAX and of the policy as one compiled program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from apex_jax.agent.algorithm import Action, Params
from apex_jax.agent.frame_store import Array

Played: TypeAlias = Any  # a pytree, see `apex_jax.environments.jax_tasks.Played`; its leaves are [E, ...]


def make_rollout(
    act: Callable[[Params, Array, Array, jax.Array, Any], Action],
    advance: Callable[[Played, jax.Array], Played],
    num_steps: int,
) -> Callable[[Params, Played, Array, jax.Array, int], tuple[Played, Played, Action]]:
    """Returns a compiled function of (params, played, exploration float32[E], key, step) that plays `num_steps` steps.

    Returns the environments after them; those on which the policy acted, without their states and keys, leaves
    [num_steps, E, ...]; and the actions, as `act` returns them.
    `advance`: (one environment, an action of the agent) -> the environment after it. `key`, `step`: of the first
    action, see `Algorithm.act`; the following actions have the following steps.
    """

    def rollout(
        params: Params, played: Played, exploration: Array, key: jax.Array, step: int
    ) -> tuple[Played, Played, Action]:
        def play(played: Played, offset: jax.Array) -> tuple[Played, tuple[Played, Action]]:
            output = act(params, played.observation, exploration, key, step + offset)
            seen = played._replace(state=None, key=None)
            return jax.vmap(advance)(played, output.action), (seen, output)

        after, (seen, output) = jax.lax.scan(play, played, jnp.arange(num_steps))
        return after, seen, output

    return jax.jit(rollout)
