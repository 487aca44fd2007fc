"""The loss of quantiles: by hand, against its NumPy twin, and where its minimum is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent.quantiles import quantile_losses
from tests.rigs import reference_dqn


def test_loss_of_two_quantiles_by_hand() -> None:
    quantiles, target = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 3.0]])
    low = (0.25 * 0.125 + 0.25 * 2.5) / 2  # tau = 1/4: errors 0.5 and 3, both positive
    high = (0.25 * 0.125 + 0.75 * 1.5) / 2  # tau = 3/4: errors -0.5 and 2
    np.testing.assert_allclose(quantile_losses(quantiles, target), [low + high], rtol=1e-6)


def test_weighted_loss_and_its_gradient_equal_their_twin() -> None:
    rng = np.random.default_rng(1)
    z, target, weight = (rng.normal(scale=2, size=size).astype(np.float32) for size in ((6, 3, 5), (6, 5), 6))
    action = rng.integers(0, 3, 6)

    def loss(z: jax.Array) -> jax.Array:
        return jnp.mean(weight * quantile_losses(z[np.arange(6), action], jnp.asarray(target)))

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(z))
    twin_value, twin_gradient, _ = reference_dqn.quantile_loss_and_gradient(z, action, target, weight)
    np.testing.assert_allclose(value, twin_value, rtol=1e-5)
    np.testing.assert_allclose(gradient, twin_gradient, rtol=1e-4, atol=1e-7)


def test_descent_finds_the_quantiles_of_the_targets() -> None:
    target = jnp.tile(jnp.arange(1000.0, 1004.0), (1, 1))  # so far apart that Huber's loss is that of quantiles
    z = jnp.zeros((1, 4)) + 1001.5
    step = jax.jit(lambda z: z - 0.05 * jax.grad(lambda z: quantile_losses(z, target).sum())(z))
    for _ in range(2000):
        z = step(z)
    assert (np.diff(z[0]) > 0).all()
    np.testing.assert_allclose(z[0], [1000, 1001, 1002, 1003], atol=0.6)


def test_unequal_numbers_of_quantiles_are_refused() -> None:
    with pytest.raises(AssertionError):
        quantile_losses(jnp.zeros((3, 4)), jnp.zeros((3, 1)))
