"""The interface between workers and learning: the functions of an algorithm, pure except for donated arguments.

Five functions train. Two more fields are the exploration rate of evaluations, and the policy that `python main.py
export` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.frame_store import Array, FrameStore
from apex_jax.types import Observation

Params: TypeAlias = Any  # nested dict of float32 arrays, as flax.linen returns it
State: TypeAlias = Any  # a NamedTuple of everything that learning changes; checkpoints save all of it


class Action(NamedTuple):
    """The actions that the policy chooses for a batch of A observations, and their values."""

    action: jax.Array  # spec.action.dtype[A, *spec.action.shape]
    value: jax.Array  # float32[A], q(s, action): estimates the return; in the scale of the rewards
    bootstrap_value: jax.Array  # float32[A], the value of s: max_a q(s, a), or q(s, pi(s)); for initial priorities


class UpdateOutput(NamedTuple):
    """The result of K updates."""

    priorities: jax.Array  # float32[K, B], new priorities of the drawn transitions
    metrics: dict[str, jax.Array]  # float32[K] by tag of `run.metrics.TAGS`; not finite if learning has diverged


class Algorithm(NamedTuple):
    """The algorithm as functions, each jitted once."""

    init: Callable[[jax.Array], State]
    """Takes a key (consumed), returns a fresh state."""
    act: Callable[[Params, Observation, Array, jax.Array, int], Action]
    """(params, observation [A, F, *O], exploration float32[A], key, step): key and step determine the randomness.

    An observation of several parts is a dict of arrays, see `apex_jax.types`.
    """
    update: Callable[[State, FrameStore, Array, Array, float], tuple[State, UpdateOutput]]
    """(state, store, indices int32[K, B], importance weights float32[K, B], learning_rate_share): makes K updates.

    `state` is donated. `learning_rate_share` scales each step that the optimizer makes with `learner.learning_rate`.
    """
    acting_params: Callable[[State], Params]
    """Returns the parameters for `act`: workers publish and evaluate them, and check that they are finite."""
    exploration: Callable[[int], np.ndarray]
    """Takes the size N of the fleet's ladder; returns the exploration rate or noise scale of each index: float32[N]."""
    evaluation_exploration: float = 0.0
    """The exploration rate or noise scale with which the evaluator acts."""
    greedy: Callable[[Params, Observation], dict[str, jax.Array]] | None = None
    """(params, observation [N, F, *O]) -> "action" [N, *spec.action.shape] without exploration, and values by name.

    It is not jitted, and N may be symbolic (`jax.export`). None: the agent cannot be exported.
    """


@jax.jit
def copy_params(params: Params) -> Params:
    """Returns a copy of the parameters in new buffers, which stay valid when the next update donates the state."""
    return jax.tree.map(jnp.copy, params)
