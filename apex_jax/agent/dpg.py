"""Ape-X DPG (Horgan et al. 2018): deterministic policy gradient with n-step returns and a ladder of noise.

Actions are in [-1, 1]; the environment scales them to its own bounds. A policy needs no critic to act, but an actor
needs q(s, a) and q(s, pi(s)) for the initial priorities of its transitions, so the actors receive both networks.

Pixels go through an encoder, which policy and critics share, after random shifts of the images (Yarats et al. 2022,
"Mastering Visual Continuous Control"). Only the loss of the critics trains it, so that it is a part of theirs. The
numbers of an observation join its outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from apex_jax.agent import losses
from apex_jax.agent.algorithm import Action, Algorithm, Params, UpdateOutput
from apex_jax.agent.exploration import noise_ladder
from apex_jax.agent.frame_store import FrameStore, Transitions, gather
from apex_jax.agent.moments import Moments, add_observations, flat_numbers, initial_moments, normalized
from apex_jax.agent.networks import Encoder, make_policy_and_critic
from apex_jax.agent.training import make_optimizer, make_update, maybe_copy_target
from apex_jax.config import Config
from apex_jax.types import FRAMES, Observation, SegmentSpec, joined, named_parts

SATURATED = 0.95  # an element of the policy's action beyond this counts as saturated: tanh has a slope of 0.1 there


class DPGState(NamedTuple):
    """Everything that learning changes. Online and target parameters start equal, in separate buffers."""

    policy: Params
    critics: Params  # a tuple of one, or two if `algorithm.twin_critics`; with pixels {"encoder": ..., "heads": it}
    target_policy: Params
    target_critics: Params
    policy_opt_state: Any
    critic_opt_state: Any
    moments: Moments  # of the observations drawn so far
    updates: jax.Array  # int32[], number of updates so far


class Networks(NamedTuple):
    """The networks as functions of their params."""

    features: Callable[..., jax.Array]  # critics, moments' mean and variance, observations [B, F, *O] -> x [B, D]
    pi: Callable[[Params, jax.Array], jax.Array]  # policy, x -> actions [B, A]
    q: Callable[[tuple[Params, ...], jax.Array, jax.Array], jax.Array]  # heads, x, actions -> values [C, B] of each


class Optimizers(NamedTuple):
    """One for each kind of network."""

    policy: optax.GradientTransformation
    critics: optax.GradientTransformation


def make_dpg(config: Config, spec: SegmentSpec, compute_dtype: Any = jnp.float32) -> Algorithm:
    """Returns the algorithm for this configuration. `compute_dtype`: dtype of the networks' activations."""
    [action_size] = spec.action.shape
    has_pixels = spec.has_images
    policy_network, critic_network = make_policy_and_critic(config.network, action_size, compute_dtype)
    encoder = Encoder(config.network, compute_dtype)
    optimizers = Optimizers(policy=make_optimizer(config.learner), critics=make_optimizer(config.learner))

    def features(critics: Params, mean: jax.Array, variance: jax.Array, observation: Observation) -> Any:
        seen: list[Any] = []
        if has_pixels:
            seen.append(encoder.apply(critics["encoder"], named_parts(observation)[FRAMES]))
        if spec.vector_size:
            seen.append(normalized(flat_numbers(observation), mean, variance))
        return jnp.concatenate(seen, axis=-1)

    def pi(policy: Params, x: jax.Array) -> jax.Array:
        return cast(jax.Array, policy_network.apply(policy, x))

    def q(heads: tuple[Params, ...], x: jax.Array, action: jax.Array) -> jax.Array:
        return jnp.stack([cast(jax.Array, critic_network.apply(head, x, action)) for head in heads])  # [C, B]

    def init(key: jax.Array) -> DPGState:
        observation = jax.tree.map(jnp.asarray, spec.zeros(1))
        action, moments = jnp.zeros((1, action_size)), initial_moments(flat_numbers(observation).size or 1)
        policy_key, *critic_keys = jax.random.split(key, 2 + config.algorithm.twin_critics)
        encoding: Params = {}
        if has_pixels:
            encoding["encoder"] = encoder.init(jax.random.fold_in(policy_key, 1), named_parts(observation)[FRAMES])
        x = features(encoding, moments.mean, moments.variance, observation)
        policy = policy_network.init(policy_key, x)
        critics: Params = tuple(critic_network.init(critic_key, x, action) for critic_key in critic_keys)
        critics = encoding | {"heads": critics} if has_pixels else critics
        return DPGState(
            policy=policy,
            critics=critics,
            target_policy=jax.tree.map(jnp.copy, policy),  # a buffer cannot be donated twice
            target_critics=jax.tree.map(jnp.copy, critics),
            policy_opt_state=optimizers.policy.init(policy),
            critic_opt_state=optimizers.critics.init(critics),
            moments=moments,
            updates=jnp.zeros((), jnp.int32),
        )

    def acting_params(state: DPGState) -> Params:
        moments = {"mean": state.moments.mean, "variance": state.moments.variance}
        return {"policy": state.policy, "critics": state.critics, "observations": moments}

    def features_of(params: Params, observation: Observation) -> Any:
        return features(params["critics"], **params["observations"], observation=observation)

    def act(params: Params, observation: Observation, noise: jax.Array, key: jax.Array, step: int) -> Action:
        x = features_of(params, observation)
        best_action = pi(params["policy"], x)
        normal = jax.random.normal(jax.random.fold_in(key, step), best_action.shape)
        action = jnp.clip(best_action + noise[:, None] * normal, -1, 1)
        heads = _heads(params["critics"])
        return Action(action, q(heads, x, action)[0], q(heads, x, best_action).min(axis=0))

    def greedy(params: Params, observation: Observation) -> dict[str, jax.Array]:
        x = features_of(params, observation)
        action = pi(params["policy"], x)
        value = cast(jax.Array, critic_network.apply(_heads(params["critics"])[0], x, action))
        return {"action": action, "value": value}

    return Algorithm(
        init=jax.jit(init),
        act=jax.jit(act),
        update=jax.jit(_make_update(config, spec, Networks(features, pi, q), optimizers), donate_argnums=0),
        acting_params=acting_params,
        exploration=lambda size: noise_ladder(size, config.actor.largest_noise, config.actor.smallest_noise),
        greedy=greedy,
    )


def _heads(critics: Params) -> tuple[Params, ...]:
    """Returns the params of each critic, without those of the encoder."""
    return critics["heads"] if isinstance(critics, dict) else critics


def _make_update(
    config: Config, spec: SegmentSpec, networks: Networks, optimizers: Optimizers
) -> Callable[..., tuple[DPGState, UpdateOutput]]:
    """Returns `Algorithm.update`, not jitted."""
    features, pi, q = networks
    has_pixels = spec.has_images

    def critic_loss(
        critics: Params, moments: Moments, batch: Transitions, target: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        """Returns the loss; the new priorities, the mean of q, and the features of the observations."""
        x = features(critics, moments.mean, moments.variance, batch.observation_t)
        q_t = q(_heads(critics), x, batch.columns["action"])
        td_errors = target - q_t
        value = sum(losses.weighted_loss(td_error, weights, config.algorithm.loss) for td_error in td_errors)
        return jnp.asarray(value), (losses.priority(td_errors[0]), q_t[0].mean(), x)

    def policy_gradient(state: DPGState, x: jax.Array) -> tuple[Params, jax.Array, jax.Array]:
        """Returns the gradient of the policy's loss, and the actions [B, A] and values [B] of the current policy.

        None flows into `x`, and so into the encoder.
        """
        action, pull_back = jax.vjp(lambda policy: pi(policy, x), state.policy)
        value, pull_back_q = jax.vjp(lambda action: q(_heads(state.critics)[:1], x, action)[0], action)
        [dq_da] = pull_back_q(jnp.ones_like(value))
        [gradient] = pull_back(losses.policy_descent(dq_da, config.algorithm.action_gradient_clip))
        return gradient, action, value

    def shifted(batch: Transitions, updates: jax.Array) -> Transitions:
        if not has_pixels or not config.algorithm.random_shift:
            return batch
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), updates))
        at = [named_parts(observation) for observation in batch[:2]]
        shifts = (
            randomly_shifted(key, parts[FRAMES], config.algorithm.random_shift)
            for key, parts in zip(keys, at, strict=True)
        )
        at_t, at_tpk = (joined(parts | {FRAMES: images}) for parts, images in zip(at, shifts, strict=True))
        return Transitions(at_t, at_tpk, batch.columns)

    def update_once(
        state: DPGState, store: FrameStore, indices: jax.Array, weights: jax.Array, learning_rate_share: jax.Array
    ) -> tuple[DPGState, UpdateOutput]:
        batch = shifted(gather(store, indices, spec.frame_stack), state.updates)
        moments = state.moments
        if config.network.normalize_observations and spec.vector_size:
            moments = add_observations(moments, flat_numbers(batch.observation_t))

        x_tpk = features(state.target_critics, moments.mean, moments.variance, batch.observation_tpk)
        q_target_tpk = q(_heads(state.target_critics), x_tpk, pi(state.target_policy, x_tpk))
        target = losses.policy_target(batch.columns["n_step_return"], batch.columns["discount"], q_target_tpk)
        (value, (priorities, q_value, x_t)), critic_grads = jax.value_and_grad(critic_loss, has_aux=True)(
            state.critics, moments, batch, target, weights
        )
        policy_grads, action, policy_value = policy_gradient(state, x_t)  # of the critics before their update
        saturation = (jnp.abs(action) > SATURATED).mean()

        deltas, critic_opt_state = optimizers.critics.update(critic_grads, state.critic_opt_state, state.critics)
        critics = optax.apply_updates(state.critics, optax.tree.scale(learning_rate_share, deltas))
        deltas, policy_opt_state = optimizers.policy.update(policy_grads, state.policy_opt_state, state.policy)
        policy = optax.apply_updates(state.policy, optax.tree.scale(learning_rate_share, deltas))

        updates = state.updates + 1
        metrics = {
            "losses/td_loss": value,  # of the critics: weighted, mean over the batch
            "losses/q_values": q_value,  # mean of q(s_t, a_t)
            "losses/gradient_norm": optax.tree.norm(critic_grads),  # global, before clipping
            "losses/policy_loss": -policy_value.mean(),
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

    return make_update(update_once, copy_target, config.learner.target_update_interval, has_pixels)


# Random shifts of images (DrQ-v2, Yarats et al. 2022), so that a critic does not depend on single pixels -------------


def randomly_shifted(key: jax.Array, images: jax.Array, most: int) -> jax.Array:
    """Returns images [B, F, H, W, ...], each stack shifted by up to `most` pixels in each direction; see `shifted`."""
    rows, columns = jax.random.randint(key, (2, len(images)), -most, most + 1)
    return shifted(images, rows, columns)


def shifted(images: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns images in which pixel (i, j) is that of (i + row, j + column), or the next one at the edge.

    This is a crop of the image padded by repeated edges. `images`: [B, F, H, W, ...]; `rows`, `columns`: int32[B].
    """
    height, width = images.shape[2:4]

    def one(stack: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
        at_row, at_column = jnp.arange(height) + row, jnp.arange(width) + column
        return stack[:, jnp.clip(at_row, 0, height - 1)][:, :, jnp.clip(at_column, 0, width - 1)]

    return jax.vmap(one)(images, rows, columns)
