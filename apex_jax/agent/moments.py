"""Running moments of the numbers in observations, with which the inputs of networks are normalized."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from apex_jax.agent.frame_store import Array
from apex_jax.types import NUMBERS, Observation, named_parts

LARGEST_TOTAL = 1e9  # beyond it, old observations are slowly forgotten; a float32 could not count for ever
EPSILON = 1e-5  # added to the variance; an element that never changes is divided by its root


class Moments(NamedTuple):
    """Mean and variance of each element of the observations so far."""

    total: jax.Array  # float32[], number of observations
    mean: jax.Array  # float32[D]
    variance: jax.Array  # float32[D], of the population


def initial_moments(size: int) -> Moments:
    """Returns the moments of no observations, with which `normalized` changes almost nothing."""
    return Moments(jnp.zeros(()), jnp.zeros(size), jnp.ones(size))


def add_observations(moments: Moments, observations: jax.Array) -> Moments:
    """Returns the moments of the earlier observations and a batch of new ones, float32[B, D], together.

    m = n_1 + n_2,  mu = mu_1 + d n_2 / m,  var = (n_1 var_1 + n_2 var_2 + d^2 n_1 n_2 / m) / m,  d = mu_2 - mu_1
    (shares of m first, so that no product of large numbers is infinite)
    (Chan et al. 1979)
    """
    n_1, n_2 = moments.total, float(len(observations))
    m = n_1 + n_2
    mean = observations.mean(axis=0)
    variance_2 = jnp.square(observations - mean).mean(axis=0)
    d = mean - moments.mean
    variance = n_1 / m * moments.variance + n_2 / m * variance_2 + d**2 * (n_1 / m * (n_2 / m))
    return Moments(jnp.minimum(m, LARGEST_TOTAL), moments.mean + d * (n_2 / m), variance)


def flat_numbers(observation: Observation) -> jax.Array:
    """Returns the part NUMBERS [B, F, D] of observations as float32[B, F x D]; it may be missing: [B, 0]."""
    parts = named_parts(observation)
    first = next(iter(parts.values()))
    return jnp.reshape(parts[NUMBERS], (first.shape[0], -1)) if NUMBERS in parts else jnp.zeros((first.shape[0], 0))


def normalized(observations: Array, mean: jax.Array, variance: jax.Array) -> jax.Array:
    """Returns (observation - mean) / sqrt(variance + EPSILON), float32[B, D]."""
    return (jnp.asarray(observations) - mean) * jax.lax.rsqrt(variance + EPSILON)
