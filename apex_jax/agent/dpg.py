"""Ape-X DPG (Horgan et al. 2018): deterministic policy gradient with n-step returns and a ladder of noise.

Actions are in [-1, 1]; the environment scales them to its own bounds. A policy needs no critic to act, but an actor
needs q(s, a) and q(s, pi(s)) for the initial priorities of its transitions, so the actors receive both networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from apex_jax.agent import losses
from apex_jax.agent.algorithm import Action, Algorithm, Params, UpdateOutput
from apex_jax.agent.devices import jit_update, mean_over_devices
from apex_jax.agent.exploration import noise_ladder
from apex_jax.agent.frame_store import Array, FrameStore, gather
from apex_jax.agent.moments import Moments, add_observations, initial_moments, normalized
from apex_jax.agent.networks import make_policy_and_critic
from apex_jax.agent.training import make_optimizer, maybe_copy_target, scan_updates_with_target
from apex_jax.config import Config
from apex_jax.types import SegmentSpec

SATURATED = 0.95  # an element of the policy's action beyond this counts as saturated: tanh has a slope of 0.1 there


class DPGState(NamedTuple):
    """Everything that learning changes. Online and target parameters start equal, in separate buffers."""

    policy: Params
    critics: tuple[Params, ...]  # one, or two if `algorithm.twin_critics`
    target_policy: Params
    target_critics: tuple[Params, ...]
    policy_opt_state: Any
    critic_opt_state: Any
    moments: Moments  # of the observations drawn so far
    updates: jax.Array  # int32[], number of updates so far


class Optimizers(NamedTuple):
    """One for each kind of network."""

    policy: optax.GradientTransformation
    critics: optax.GradientTransformation


def make_dpg(config: Config, spec: SegmentSpec, compute_dtype: Any = jnp.float32) -> Algorithm:
    """Returns the algorithm for this configuration. `compute_dtype`: dtype of the networks' activations."""
    [action_size] = spec.action.shape
    observation_size = spec.frame_stack * math.prod(spec.frame_shape)
    policy_network, critic_network = make_policy_and_critic(config.network, action_size, compute_dtype)
    optimizers = Optimizers(policy=make_optimizer(config.learner), critics=make_optimizer(config.learner))

    def pi(policy: Params, x: jax.Array) -> jax.Array:
        return cast(jax.Array, policy_network.apply(policy, x))

    def q(critics: tuple[Params, ...], x: jax.Array, action: jax.Array) -> jax.Array:
        return jnp.stack([cast(jax.Array, critic_network.apply(critic, x, action)) for critic in critics])  # [C, B]

    def init(key: jax.Array) -> DPGState:
        x, action = jnp.zeros((1, observation_size)), jnp.zeros((1, action_size))
        policy_key, *critic_keys = jax.random.split(key, 2 + config.algorithm.twin_critics)
        policy = policy_network.init(policy_key, x)
        critics = tuple(critic_network.init(critic_key, x, action) for critic_key in critic_keys)
        return DPGState(
            policy=policy,
            critics=critics,
            target_policy=jax.tree.map(jnp.copy, policy),  # a buffer cannot be donated twice
            target_critics=jax.tree.map(jnp.copy, critics),
            policy_opt_state=optimizers.policy.init(policy),
            critic_opt_state=optimizers.critics.init(critics),
            moments=initial_moments(observation_size),
            updates=jnp.zeros((), jnp.int32),
        )

    def acting_params(state: DPGState) -> Params:
        moments = {"mean": state.moments.mean, "variance": state.moments.variance}
        return {"policy": state.policy, "critics": state.critics, "observations": moments}

    def act(params: Params, observation: Array, noise: jax.Array, key: jax.Array, step: int) -> Action:
        x = normalized(jnp.reshape(observation, (len(observation), -1)), **params["observations"])
        best_action = pi(params["policy"], x)
        normal = jax.random.normal(jax.random.fold_in(key, step), best_action.shape)
        action = jnp.clip(best_action + noise[:, None] * normal, -1, 1)
        value = q(params["critics"], x, action)[0]
        return Action(action, value, q(params["critics"], x, best_action).min(axis=0))

    def greedy(params: Params, observation: jax.Array) -> dict[str, jax.Array]:
        x = normalized(jnp.reshape(observation, (observation.shape[0], -1)), **params["observations"])
        action = pi(params["policy"], x)
        return {"action": action, "value": cast(jax.Array, critic_network.apply(params["critics"][0], x, action))}

    return Algorithm(
        init=jax.jit(init),
        act=jax.jit(act),
        update=jit_update(_make_update(config, spec, pi, q, optimizers), config.learner.devices),
        acting_params=acting_params,
        exploration=lambda size: noise_ladder(size, config.actor.largest_noise, config.actor.smallest_noise),
        greedy=greedy,
    )


def _make_update(
    config: Config,
    spec: SegmentSpec,
    pi: Callable[[Params, jax.Array], jax.Array],
    q: Callable[[tuple[Params, ...], jax.Array, jax.Array], jax.Array],
    optimizers: Optimizers,
) -> Callable[..., tuple[DPGState, UpdateOutput]]:
    """Returns `Algorithm.update`, not jitted."""

    def critic_loss(
        critics: tuple[Params, ...], x: jax.Array, action: jax.Array, target: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        q_t = q(critics, x, action)
        td_errors = target - q_t
        value = sum(losses.weighted_loss(td_error, weights, config.algorithm.loss) for td_error in td_errors)
        return jnp.asarray(value), (losses.priority(td_errors[0]), q_t[0].mean())

    def policy_gradient(state: DPGState, x: jax.Array) -> tuple[Params, jax.Array, jax.Array]:
        """Returns the gradient of the policy's loss, and the actions [B, A] and values [B] of the current policy."""
        action, pull_back = jax.vjp(lambda policy: pi(policy, x), state.policy)
        value, pull_back_q = jax.vjp(lambda action: q(state.critics[:1], x, action)[0], action)
        [dq_da] = pull_back_q(jnp.ones_like(value))
        [gradient] = pull_back(losses.policy_descent(dq_da, config.algorithm.action_gradient_clip))
        return gradient, action, value

    def update_once(
        state: DPGState, store: FrameStore, indices: jax.Array, weights: jax.Array, learning_rate_share: jax.Array
    ) -> tuple[DPGState, UpdateOutput]:
        batch = gather(store, indices, spec.frame_stack)
        columns, size = batch.columns, len(indices)
        observation_t, observation_tpk = batch.observation_t.reshape(size, -1), batch.observation_tpk.reshape(size, -1)
        moments = state.moments
        if config.network.normalize_observations:
            moments = add_observations(moments, observation_t, config.learner.devices)
        x_t, x_tpk = (normalized(each, moments.mean, moments.variance) for each in (observation_t, observation_tpk))

        q_target_tpk = q(state.target_critics, x_tpk, pi(state.target_policy, x_tpk))
        target = losses.policy_target(columns["n_step_return"], columns["discount"], q_target_tpk)
        critic_gradient = jax.value_and_grad(critic_loss, has_aux=True)
        (value, (priorities, q_value)), critic_grads = critic_gradient(
            state.critics, x_t, columns["action"], target, weights
        )
        policy_grads, action, policy_value = policy_gradient(state, x_t)  # of the critics before their update
        saturation = (jnp.abs(action) > SATURATED).mean()
        critic_grads, policy_grads, value, q_value, policy_value, saturation = mean_over_devices(
            (critic_grads, policy_grads, value, q_value, policy_value.mean(), saturation), config.learner.devices
        )

        deltas, critic_opt_state = optimizers.critics.update(critic_grads, state.critic_opt_state, state.critics)
        critics = optax.apply_updates(state.critics, optax.tree.scale(learning_rate_share, deltas))
        deltas, policy_opt_state = optimizers.policy.update(policy_grads, state.policy_opt_state, state.policy)
        policy = optax.apply_updates(state.policy, optax.tree.scale(learning_rate_share, deltas))

        updates = state.updates + 1
        metrics = {
            "losses/td_loss": value,  # of the critics: weighted, mean over the batch
            "losses/q_values": q_value,  # mean of q(s_t, a_t)
            "losses/gradient_norm": optax.tree.norm(critic_grads),  # global, before clipping
            "losses/policy_loss": -policy_value,
            "losses/policy_gradient_norm": optax.tree.norm(policy_grads),
            "losses/action_saturation": saturation,
        }
        targets = state.target_policy, state.target_critics
        state = DPGState(policy, critics, *targets, policy_opt_state, critic_opt_state, moments, updates)
        return state, UpdateOutput(priorities, metrics)

    def copy_target(is_due: jax.Array, state: DPGState) -> DPGState:
        online, target = (state.policy, state.critics), (state.target_policy, state.target_critics)
        policy, critics = maybe_copy_target(is_due, online, target)
        return state._replace(target_policy=policy, target_critics=critics)

    def update(
        state: DPGState, store: FrameStore, indices: jax.Array, weights: jax.Array, learning_rate_share: jax.Array
    ) -> tuple[DPGState, UpdateOutput]:
        def once(state: DPGState, indices: jax.Array, weights: jax.Array) -> tuple[DPGState, UpdateOutput]:
            return update_once(state, store, indices, weights, learning_rate_share)

        interval = config.learner.target_update_interval
        return scan_updates_with_target(once, copy_target, interval, state, indices, weights, unrolled=False)

    return update
