"""The first convolution on blocks of pixels, for GPUs, is the plain one: outputs, gradients, parameters."""

from __future__ import annotations

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent import networks
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.frame_store import create_store, gather, insert_segments
from apex_jax.agent.space_to_depth import BlockConvolution, block_size, frame_block_size
from apex_jax.config import Config, LearnerConfig, NetworkConfig
from apex_jax.types import ActionSpec, SegmentSpec, zero_columns

ATARI = SegmentSpec((84, 84), "uint8", frame_stack=4, slots=16, n_step=3, action=ActionSpec.discrete(6))


def plain_convolution(layer: BlockConvolution, params: Any, pixels: jax.Array) -> jax.Array:
    """Returns the output of `nn.Conv` of the same sizes with the same parameters."""
    sizes = (layer.kernel_size,) * 2, (layer.stride,) * 2
    x = jnp.moveaxis(pixels, 1, 3)
    x = x.reshape(*x.shape[:3], -1).astype(layer.dtype) / 255
    return cast(jax.Array, nn.Conv(layer.features, *sizes, padding="VALID", dtype=layer.dtype).apply(params, x))


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("kernel_size", "stride", "shape"),
    [(8, 4, (4, 84, 84)), (4, 4, (4, 44, 44)), (4, 2, (3, 31, 26)), (6, 3, (2, 20, 24, 3))],
    ids=["atari", "atari_cpu", "with a rest", "color"],
)
def test_outputs_and_gradients_are_those_of_the_plain_convolution(
    kernel_size: int, stride: int, shape: tuple[int, ...], dtype: Any, tolerance: float
) -> None:
    rng = np.random.default_rng(7)
    layer = BlockConvolution(5, kernel_size, stride, dtype)
    pixels = jnp.asarray(rng.integers(0, 256, (2, *shape), dtype=np.uint8))
    params = jax.tree.map(lambda x: x + rng.normal(size=x.shape), layer.init(jax.random.key(0), pixels))

    def mean_square(params: Any, is_plain: bool) -> tuple[jax.Array, jax.Array]:
        y = plain_convolution(layer, params, pixels) if is_plain else cast(jax.Array, layer.apply(params, pixels))
        return jnp.mean(jnp.square(y.astype(jnp.float32))), y

    results = [jax.value_and_grad(mean_square, has_aux=True)(params, is_plain) for is_plain in (False, True)]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("backend", "settings", "frame_shape", "of_convolution", "of_frames"),
    [
        ("gpu", {}, (84, 84), 4, 4),
        ("cpu", {}, (84, 84), 1, 1),
        ("gpu", {}, (86, 86), 4, 1),  # frames with a rest stay whole
        ("gpu", {}, (24, 40, 3), 4, 4),
        ("gpu", {"kernel_sizes": (6, 4, 3)}, (84, 84), 1, 1),
        ("gpu", {"torso": "impala"}, (84, 84), 1, 1),
        ("gpu", {"channels": (), "kernel_sizes": (), "strides": ()}, (84, 84), 1, 1),
        ("gpu", {}, (17,), 4, 1),  # vectors
    ],
)
def test_blocks_are_used_on_a_gpu_if_the_stride_divides_the_kernel_and_for_frames_that_it_divides(
    backend: str,
    settings: dict[str, Any],
    frame_shape: tuple[int, ...],
    of_convolution: int,
    of_frames: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    network = NetworkConfig(**settings)
    assert block_size(network) == of_convolution
    assert frame_block_size(network, frame_shape) == of_frames


@pytest.mark.parametrize("frame_shape", [(8, 12), (8, 12, 3)])
def test_a_store_in_blocks_returns_the_frames_that_were_inserted(frame_shape: tuple[int, ...]) -> None:
    spec, rng = ATARI._replace(frame_shape=frame_shape), np.random.default_rng(2)
    frames = rng.integers(0, 256, (3, spec.slots, *frame_shape), dtype=np.uint8)
    columns = {name: np.stack([column] * 3) for name, column in zero_columns(spec).items()}
    columns["bootstrap_offset"][:] = 2
    store = create_store(spec, 3, block_size=4)
    assert store.frames.shape == (3, spec.slots, 2, 3, 4, 4, *frame_shape[2:])
    store = insert_segments(store, np.array([2, 0, 1], np.int32), frames, columns)
    batch = gather(store, jnp.array([spec.slots + 5]), spec.frame_stack)
    np.testing.assert_array_equal(batch.observation_t[0], frames[2, 2:6])
    np.testing.assert_array_equal(batch.observation_tpk[0], frames[2, 4:8])


def test_an_update_of_a_store_in_blocks_is_that_of_plain_frames_and_never_makes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(3)
    network = NetworkConfig(channels=(4,), kernel_sizes=(8,), strides=(4,), hidden_units=8, dueling=False)
    config = Config(network=network, learner=LearnerConfig(batch_size=16))
    frames = rng.integers(0, 256, (2, ATARI.slots, 84, 84), dtype=np.uint8)
    columns = {name: np.stack([column] * 2) for name, column in zero_columns(ATARI).items()}
    columns["n_step_return"] = rng.normal(size=(2, ATARI.slots)).astype(np.float32)
    batch = rng.integers(3, 12, (1, 16), np.int32), np.ones((1, 16), np.float32), np.float32(1)

    def updated(size: int) -> tuple[Any, str]:
        monkeypatch.setattr(networks, "block_size", lambda network: size)
        dqn = make_dqn(config, ATARI)
        state = dqn.init(jax.random.key(0))
        store = insert_segments(create_store(ATARI, 2, block_size=size), np.arange(2, dtype=np.int32), frames, columns)
        update: Any = dqn.update
        program = update.lower(state, store, *batch).compile()
        return program(state, store, *batch), program.as_text()

    (plain, plain_text), (in_blocks, text) = updated(1), updated(4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), in_blocks, plain)
    assert "84,84" in plain_text
    assert "84,84" not in text
