"""Specification of `apex_jax.transport.params_codec`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.host.errors import UsageError
from apex_jax.transport import params_codec


def random_params(seed: int) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(4, 3)).astype(np.float32).T  # in an order of its own in memory
    return {
        "Dense_0": {"kernel": kernel, "bias": np.zeros(4, np.float32)},
        "empty": {"kernel": np.zeros((0, 4), np.float32)},
        "scale": {"value": np.full((), rng.normal(), np.float32)},
    }


def test_weights_come_back_bit_for_bit_by_shapes_alone_as_read_only_views() -> None:
    params = random_params(0)
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params))
    body = params_codec.encode_weights(jax.tree.map(jnp.asarray, params))
    assert body == params_codec.encode_weights(params)
    for like in (shapes, random_params(1)):
        decoded = params_codec.decode_weights(body, like)
        jax.tree.map(np.testing.assert_array_equal, decoded, params)
        assert not any(leaf.flags.writeable for leaf in jax.tree.leaves(decoded))
        assert params_codec.architecture_of(like) == params_codec.architecture_of(params)


def test_architecture_is_the_same_text_on_every_machine_and_release() -> None:
    params = {"b": np.zeros((2, 3), np.float32), "a": (np.zeros(5, np.float32),)}
    assert params_codec.architecture_of(params) == "d21d3959fe9be565"  # sha256 of "['a'][0] (5,)\n['b'] (2, 3)"


@pytest.mark.parametrize("other", [
    {"a": np.zeros((3, 2), np.float32)},
    {"b": np.zeros((2, 3), np.float32)},
    {"a": {"a": np.zeros((2, 3), np.float32)}},
], ids=["shape", "name", "depth"])  # fmt: skip
def test_different_architectures_have_different_digests(other: dict[str, np.ndarray]) -> None:
    assert params_codec.architecture_of(other) != params_codec.architecture_of({"a": np.zeros((2, 3), np.float32)})


def test_weights_that_are_not_float32_are_an_error_that_names_the_leaf() -> None:
    with pytest.raises(ValueError, match=r"weights\['a'\] is float64"):
        params_codec.architecture_of({"a": np.zeros(3)})


def test_network_that_is_too_large_to_be_sent_is_one_line_of_error() -> None:
    like = {"a": jax.ShapeDtypeStruct((2**27 + 1,), jnp.float32)}
    with pytest.raises(UsageError, match=r"512 MiB.*network.hidden_units"):
        params_codec.architecture_of(like)
