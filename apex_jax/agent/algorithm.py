"""All that workers know of learning: an algorithm is a few functions, pure but for what they are said to consume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.frame_store import Array, FrameStore

Params: TypeAlias = Any  # nested dict of float32 arrays, as flax.linen returns it
State: TypeAlias = Any  # a NamedTuple: all that learning changes, and all that a checkpoint must hold of it


class Action(NamedTuple):
    """The policy's answer to a batch of A observations."""

    action: jax.Array  # spec.action.dtype[A, *spec.action.shape]
    value: jax.Array  # float32[A], q(s, action)
    bootstrap_value: jax.Array  # float32[A], max_a q(s, a), or q(s, pi(s)): what initial priorities are made of


class UpdateOutput(NamedTuple):
    """What K updates have to say."""

    priorities: jax.Array  # float32[K, B], of the drawn transitions
    metrics: dict[str, jax.Array]  # float32[K], by tag, see `apex_jax.metrics.TAGS`; not finite = learning has diverged


class Algorithm(NamedTuple):
    """The algorithm as functions, each jitted once."""

    init: Callable[[jax.Array], State]
    """Takes a key (consumed), returns a fresh state."""
    act: Callable[[Params, Array, Array, jax.Array, int], Action]
    """(params, observation [A, F, *O], exploration float32[A], key, step): random in key and step alone."""
    update: Callable[[State, FrameStore, Array, Array, float], tuple[State, UpdateOutput]]
    """(state, store, indices int32[K, B], importance weights float32[K, B], learning_rate_share): K updates in turn.

    `state` is donated. Each step is `learning_rate_share` times what the optimizer makes of `learner.learning_rate`.
    """
    acting_params: Callable[[State], Params]
    """Returns what `act` takes of a state: it is published, evaluated, and checked for being finite."""
    exploration: Callable[[int], np.ndarray]
    """Takes the size N of the fleet's ladder, returns how much each environment on it explores: float32[N]."""


@jax.jit
def copy_params(params: Params) -> Params:
    """Returns parameters in buffers of their own, which the next update does not donate away."""
    return jax.tree.map(jnp.copy, params)
