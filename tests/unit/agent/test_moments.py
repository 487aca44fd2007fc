"""Running moments of observations equal NumPy's moments of all observations at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.moments import EPSILON, LARGEST_TOTAL, add_observations, initial_moments, normalized


def test_moments_of_batches_equal_those_of_all_observations_at_once() -> None:
    rng, add = np.random.default_rng(1), jax.jit(add_observations)
    scale, offset = np.array([1e-3, 1.0, 300.0, 0.0]), np.array([5.0, -2.0, 1e3, 7.0])
    moments, seen = initial_moments(4), np.zeros((0, 4), np.float32)
    for _ in range(200):
        batch = (rng.normal(size=(16, 4)) * scale + offset).astype(np.float32)
        moments, seen = add(moments, batch), np.concatenate([seen, batch])
        exact = seen.astype(np.float64)
        assert moments.total == len(seen)
        np.testing.assert_allclose(moments.mean, exact.mean(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(moments.variance, exact.var(axis=0), rtol=1e-3, atol=1e-6)


def test_initial_moments_leave_observations_nearly_as_they_are() -> None:
    observations = np.random.default_rng(2).normal(size=(5, 3)).astype(np.float32)
    moments = initial_moments(3)
    x = np.asarray(normalized(observations, moments.mean, moments.variance))
    np.testing.assert_allclose(x, observations, rtol=1e-5)


def test_normalized_observations_have_mean_0_and_variance_1_and_a_constant_is_0() -> None:
    observations = np.random.default_rng(3).normal(7, 5, size=(1000, 2)).astype(np.float32)
    observations[:, 1] = 3.5
    moments = add_observations(initial_moments(2), jnp.asarray(observations))
    x = np.asarray(normalized(observations, moments.mean, moments.variance))
    np.testing.assert_allclose([x[:, 0].mean(), x[:, 0].var()], [0, 1], atol=1e-3)
    assert np.abs(x[:, 1]).max() <= 1e-3 / np.sqrt(EPSILON)


def test_count_of_observations_stops_growing_at_the_precision_of_float32() -> None:
    moments = initial_moments(1)._replace(total=jnp.float32(LARGEST_TOTAL))
    assert add_observations(moments, jnp.ones((128, 1))).total == jnp.float32(LARGEST_TOTAL)
