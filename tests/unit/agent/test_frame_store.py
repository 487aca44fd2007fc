"""The frame store against a NumPy twin: inserts of any number of segments in place, and frames in blocks for GPUs."""

from __future__ import annotations

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax import segment_codec
from apex_jax.agent import networks
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.frame_store import FrameStore, create_store, gather, insert_segments
from apex_jax.agent.space_to_depth import BlockConvolution, block_size, frame_block_size
from apex_jax.config import Config, LearnerConfig, NetworkConfig
from apex_jax.segment_codec import CorruptSegment, decode_segment, encode_segment
from apex_jax.types import ActionSpec, Column, Columns, SegmentSpec, zero_columns
from tests.rigs.agents import CONTINUOUS
from tests.rigs.links import SPEC, segment_of

PIXELS = SegmentSpec((6, 5), "uint8", frame_stack=4, slots=12, n_step=3, action=ActionSpec.discrete(6))
VECTORS = SegmentSpec((7,), "float32", frame_stack=1, slots=9, n_step=2, action=ActionSpec.discrete(2))
CAPACITY = 24

specs = pytest.mark.parametrize("spec", [PIXELS, VECTORS], ids=["pixels", "vectors"])


def random_segments(rng: np.random.Generator, spec: SegmentSpec, count: int) -> tuple[np.ndarray, Columns]:
    shape = (count, spec.slots)
    frames = rng.integers(0, 256, (*shape, *spec.frame_shape)).astype(spec.frame_dtype)
    return frames, dict(
        priority=np.ones(shape, np.float32),
        n_step_return=rng.normal(size=shape).astype(np.float32),
        discount=rng.random(shape, np.float32),
        action=rng.integers(0, spec.action.num_actions, shape, dtype=np.int32),
        bootstrap_offset=rng.integers(1, spec.n_step + 1, shape, dtype=np.uint8),
    )


def empty_twin(spec: SegmentSpec) -> dict[str, np.ndarray]:
    """A store as a dict of NumPy arrays."""
    frames, columns = random_segments(np.random.default_rng(0), spec, CAPACITY)
    return {"frames": np.zeros_like(frames)} | {name: np.zeros_like(x) for name, x in columns.items()}


def arrays_of(store: FrameStore) -> dict[str, Any]:
    return {"frames": store.frames, **store.columns}


def assert_equal_to_twin(store: FrameStore, twin: dict[str, np.ndarray]) -> None:
    assert twin.keys() - arrays_of(store).keys() == {"priority"}
    for name, array in arrays_of(store).items():
        assert array.dtype == twin[name].dtype
        np.testing.assert_array_equal(array, twin[name], err_msg=name)


def pointers(store: FrameStore) -> dict[str, Any]:
    return {name: array.unsafe_buffer_pointer() for name, array in arrays_of(store).items()}


@specs
@pytest.mark.parametrize("count", [0, 1, 3, 8, 11, 20])
def test_inserted_segments_equal_a_numpy_copy(spec: SegmentSpec, count: int) -> None:
    rng = np.random.default_rng(count)
    store, twin = create_store(spec, CAPACITY), empty_twin(spec)
    for _ in range(3):  # later rounds overwrite segments of earlier ones
        slots = rng.permutation(CAPACITY)[:count].astype(np.int32)
        frames, columns = random_segments(rng, spec, count)
        store = insert_segments(store, slots, frames, columns)
        twin["frames"][slots] = frames
        for name, column in columns.items():
            twin[name][slots] = column
        assert_equal_to_twin(store, twin)


@specs
def test_segments_are_written_in_place(spec: SegmentSpec) -> None:
    rng = np.random.default_rng(1)
    before = create_store(spec, CAPACITY)
    where = pointers(before)
    after = insert_segments(before, np.arange(11, dtype=np.int32), *random_segments(rng, spec, 11))
    assert pointers(after) == where
    assert all(array.is_deleted() for array in jax.tree.leaves(before))


def travelled(spec: SegmentSpec, **columns: np.ndarray) -> Any:
    """What the update gathers of slot 1 of a segment that has been encoded, decoded and stored."""
    segment = segment_of(7)
    segment = segment._replace(columns=segment.columns | columns)
    decoded = decode_segment(encode_segment(segment, spec), spec)
    stacked = {name: column[None] for name, column in decoded.columns.items()}
    store = insert_segments(create_store(spec, 3), np.array([2], np.int32), decoded.frames[None], stacked)
    return gather(store, jnp.array([2 * spec.slots + 1]), spec.frame_stack)


def test_a_new_column_takes_one_line_of_segment_spec_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (*SPEC.columns, Column("reward_parts", "float32", (2, 2)))
    monkeypatch.setattr(SegmentSpec, "columns", columns)
    monkeypatch.setattr(segment_codec, "layout_of", segment_codec.layout_of.__wrapped__)  # without its cache
    parts = np.random.default_rng(0).normal(size=(SPEC.slots, 2, 2)).astype(np.float32)
    batch = travelled(SPEC, reward_parts=parts)
    np.testing.assert_array_equal(batch.columns["reward_parts"][0], parts[1])
    assert batch.columns["n_step_return"].shape == (1,)


@pytest.mark.parametrize("value", [1.0001, -1.0001, np.nan, np.inf])
def test_an_action_outside_its_bounds_is_refused(value: float) -> None:
    action = np.zeros((SPEC.slots, 3), np.float32)
    action[4, 2] = value
    with pytest.raises(CorruptSegment, match="bad_action"):
        travelled(SPEC._replace(action=CONTINUOUS), action=action)


# Frames in blocks, for GPUs -----------------------------------------------------------------------------------------


ATARI = SegmentSpec((84, 84), "uint8", frame_stack=4, slots=16, n_step=3, action=ActionSpec.discrete(6))


def plain_convolution(layer: BlockConvolution, params: Any, pixels: jax.Array) -> jax.Array:
    """Returns the output of `nn.Conv` of the same sizes with the same parameters."""
    sizes = (layer.kernel_size,) * 2, (layer.stride,) * 2
    x = jnp.moveaxis(pixels, 1, 3)
    x = x.reshape(*x.shape[:3], -1).astype(layer.dtype) / 255
    return cast(jax.Array, nn.Conv(layer.features, *sizes, padding="VALID", dtype=layer.dtype).apply(params, x))


@pytest.mark.parametrize(("kernel_size", "stride", "shape", "dtype", "tolerance"), [
    (4, 2, (3, 31, 26), jnp.float32, 1e-5),  # with a rest
    *(pytest.param(*more, marks=pytest.mark.long) for more in (
        (8, 4, (4, 84, 84), jnp.float32, 1e-5),
        (4, 4, (4, 44, 44), jnp.bfloat16, 2e-2),
        (6, 3, (2, 20, 24, 3), jnp.float32, 1e-5),
    )),
])  # fmt: skip
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


@pytest.mark.parametrize(("backend", "settings", "frame_shape", "sizes"), [  # sizes: of the convolution, of the frames
    ("gpu", {}, (84, 84), (4, 4)),
    ("cpu", {}, (84, 84), (1, 1)),
    ("gpu", {}, (86, 86), (4, 1)),  # frames with a rest stay whole
    ("gpu", {}, (24, 40, 3), (4, 4)),
    ("gpu", {"kernel_sizes": (6, 4, 3)}, (84, 84), (1, 1)),
    ("gpu", {"torso": "impala"}, (84, 84), (1, 1)),
    ("gpu", {"channels": (), "kernel_sizes": (), "strides": ()}, (84, 84), (1, 1)),
    ("gpu", {}, (17,), (4, 1)),  # vectors
])  # fmt: skip
def test_blocks_are_used_on_a_gpu_if_the_stride_divides_the_kernel_and_for_frames_that_it_divides(
    backend: str, settings: dict[str, Any], frame_shape: Any, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    network = NetworkConfig(**settings)
    assert (block_size(network), frame_block_size(network, frame_shape)) == sizes


@pytest.mark.long
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
