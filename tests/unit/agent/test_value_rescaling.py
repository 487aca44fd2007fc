"""h and its inverse: against the formulas of the paper in float64, and as inverses of each other for any value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent.value_rescaling import rescaled, unscaled
from tests.rigs import reference_dqn

SIZES = 10.0 ** np.arange(-8, 13)
ANY = np.concatenate([-SIZES[::-1], [0.0], SIZES]).astype(np.float32)  # in order


@pytest.fixture(params=["numpy", "jitted"])
def of(request: pytest.FixtureRequest) -> Callable[[Callable, Any], Any]:
    """Applies a function to an array of NumPy, or jitted."""
    return lambda function, x: (jax.jit(function) if request.param == "jitted" else function)(x)


def test_rescaling_and_its_inverse_equal_the_formulas_of_the_paper(of: Callable) -> None:
    np.testing.assert_allclose(of(rescaled, ANY), [reference_dqn.h(float(x)) for x in ANY], rtol=1e-6, atol=1e-15)
    exact = [reference_dqn.inverse_h(float(x)) for x in ANY]  # the formula loses 1e-14 even in float64
    np.testing.assert_allclose(of(unscaled, ANY), exact, rtol=1e-6, atol=1e-12)


def test_rescaling_and_then_its_inverse_return_values_of_any_size(of: Callable) -> None:
    np.testing.assert_allclose(of(unscaled, of(rescaled, ANY)), ANY, rtol=1e-6, atol=0)
    np.testing.assert_allclose(of(rescaled, of(unscaled, ANY)), ANY, rtol=1e-6, atol=0)


def test_rescaling_and_its_inverse_are_odd_and_increasing(of: Callable) -> None:
    for function in (rescaled, unscaled):
        values = np.asarray(of(function, ANY))
        assert values.dtype == np.float32
        assert (np.diff(values) > 0).all()
        np.testing.assert_array_equal(values, -of(function, -ANY))


def test_a_return_of_ten_thousand_is_learned_as_199() -> None:
    np.testing.assert_allclose(rescaled(jnp.array([1e4, 0.0, 1.0])), [199.005, 0, 0.424214], rtol=1e-5)
