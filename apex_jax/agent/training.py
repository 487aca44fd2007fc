"""Parts common to the updates of all algorithms: the optimizer, target copies, and several updates in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from apex_jax.agent.algorithm import Params, State, UpdateOutput
from apex_jax.agent.frame_store import FrameStore
from apex_jax.config import LearnerConfig


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """Returns global-norm clipping, then centered RMSProp or Adam (the paper's for DQN and for DPG).

    RMSProp: g_bar and s decay towards g and g^2; theta -= lr g / sqrt(s - g_bar^2 + epsilon), no momentum.
    """
    steps = {
        "rmsprop": partial(_centered_rmsprop, decay=config.rmsprop_decay, epsilon=config.optimizer_epsilon),
        "adam": partial(optax.adam, eps=config.optimizer_epsilon),
    }
    clip = optax.clip_by_global_norm(config.max_gradient_norm) if config.max_gradient_norm else optax.identity()
    return optax.chain(clip, steps[config.optimizer](config.learning_rate))


def _centered_rmsprop(learning_rate: float, decay: float, epsilon: float) -> optax.GradientTransformation:
    """Returns optax.rmsprop(centered=True), except that the variance s - g_bar^2 is never negative.

    In float32, rounding makes it negative for gradients that hardly change; from about s = 1 on, by more than an
    epsilon of 1.5e-7.
    """

    def scale(grads: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        mean = optax.tree.update_moment(grads, state.mu, decay, 1)
        square = optax.tree.update_moment_per_elem_norm(grads, state.nu, decay, 2)
        scaled = jax.tree.map(
            lambda g, m, s: g * jax.lax.rsqrt(jnp.maximum(s - m * m, 0) + epsilon), grads, mean, square
        )
        return scaled, state._replace(mu=mean, nu=square)

    scale_by_stddev = optax.GradientTransformation(optax.scale_by_stddev().init, scale)
    # optax.rmsprop ends with its momentum; without that part, earlier checkpoints could not be restored.
    return optax.chain(scale_by_stddev, optax.scale_by_learning_rate(learning_rate), optax.identity())


def maybe_copy_target(is_due: jax.Array, online_params: Params, target_params: Params) -> Params:
    """Returns the next target parameters: the online ones if a copy is due, otherwise the current ones.

    On a GPU a branch may wait for the host, so both are read and one is selected. On a CPU a branch costs nothing, and
    a selection would cost 5 to 10 % of an update.
    """
    if jax.default_backend() == "cpu":
        return jax.lax.cond(is_due, lambda: online_params, lambda: target_params)
    return jax.tree.map(partial(jnp.where, is_due), online_params, target_params)


def scan_updates(
    update_once: Callable[[State, jax.Array, jax.Array], tuple[State, UpdateOutput]],
    state: State,
    indices: jax.Array,
    weights: jax.Array,
    unrolled: bool,
) -> tuple[State, UpdateOutput]:
    """Makes the K updates of a call: `update_once(state, indices int32[B], weights float32[B])`, K times in turn.

    `unrolled`: as K copies of the program, which compile longer, instead of a loop.
    """
    if not unrolled:
        return jax.lax.scan(lambda state, batch: update_once(state, *batch), state, (indices, weights))
    outputs = []
    for batch in zip(indices, weights, strict=True):
        state, output = update_once(state, *batch)
        outputs.append(output)
    return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def make_update(
    update_once: Callable[..., tuple[State, UpdateOutput]],
    copy_target: Callable[[jax.Array, State], State],
    interval: int,
    has_convolutions: bool,
) -> Callable[..., tuple[State, UpdateOutput]]:
    """Returns `Algorithm.update`, not jitted: K updates, and the target parameters copied every `interval` updates.

    `update_once`: as the result, with the indices int32[B] and weights float32[B] of one update.
    `copy_target(is_due bool[], state)`: copies them if `is_due`. On a GPU, a call reads all parameters even if it
    copies none, so it is made once for the K updates if K divides the interval. `state.updates`: int32[], the count.
    """

    def update(
        state: State, store: FrameStore, indices: jax.Array, weights: jax.Array, learning_rate_share: jax.Array
    ) -> tuple[State, UpdateOutput]:
        is_cpu, updates_before = jax.default_backend() == "cpu", state.updates
        copies_at_the_end = not is_cpu and interval % len(indices) == 0

        def once(state: State, indices: jax.Array, weights: jax.Array) -> tuple[State, UpdateOutput]:
            state, output = update_once(state, store, indices, weights, learning_rate_share)
            return state if copies_at_the_end else copy_target(state.updates % interval == 0, state), output

        # In a loop, XLA would run convolutions on one core of a CPU; without them, a loop compiles in half the time.
        state, output = scan_updates(once, state, indices, weights, unrolled=is_cpu and has_convolutions)
        if copies_at_the_end:  # after a resume with another K, the count may pass a multiple inside a call
            state = copy_target(state.updates // interval > updates_before // interval, state)
        return state, output

    return update
