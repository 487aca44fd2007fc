"""Observations of several parts, from the steps of environments to the update: each part as if it were alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zstandard

from apex_jax.agent.dpg import make_dpg
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.frame_store import create_store, gather, insert_segments, store_bytes
from apex_jax.agent.networks import QNetwork
from apex_jax.agent.segments import SegmentBuilder
from apex_jax.config import Config, LearnerConfig, NetworkConfig
from apex_jax.segment_codec import CorruptSegment, decode_segment, decode_segments, encode_segment, layout_of
from apex_jax.types import ActionSpec, SegmentSpec, Step
from tests.rigs.agents import assert_equal_bits

ACTIONS, STACK = ActionSpec.discrete(3), 3
PARTS = {
    "frames": SegmentSpec((5, 3, 2), "uint8", STACK, 12, 2, ACTIONS),
    "numbers": SegmentSpec((4,), "float32", STACK, 12, 2, ACTIONS),
}
SPEC = PARTS["frames"]._replace(numbers=4, action=ACTIONS._replace(is_masked=True))
ENVIRONMENTS = 4


def random_steps(seed: int, count: int = 60) -> list[Step]:
    """Returns steps of environments whose episodes end at random; each step's frames and vectors are new."""
    rng, steps, ended = np.random.default_rng(seed), list[Step](), np.ones(ENVIRONMENTS, bool)
    seen = SPEC.zeros(ENVIRONMENTS)
    for _ in range(count):
        for name, part in seen.items():
            newest = rng.integers(2 if name == "mask" else 256, size=part[:, -1].shape).astype(part.dtype)
            pushed = np.concatenate([part[:, 1:], newest[:, None]], axis=1)
            first = ended.reshape(-1, *[1] * (part.ndim - 1))
            seen = seen | {name: np.where(first, np.repeat(newest[:, None], part.shape[1], axis=1), pushed)}
        ends = rng.random((2, ENVIRONMENTS)) < 0.1
        flags = ended, ends[0] & ~ended, ends[1] & ~ended & ~ends[0]
        env_id, reward = np.arange(ENVIRONMENTS, dtype=np.int32), rng.normal(size=ENVIRONMENTS).astype(np.float32)
        none = np.zeros(ENVIRONMENTS, bool), np.zeros((ENVIRONMENTS, 0), np.float32)
        steps.append(Step(env_id, seen, reward, *flags, *none))
        ended = flags[1] | flags[2]
    return steps


def segments_of(spec: SegmentSpec, steps: list[Step], **options: Any) -> list[Any]:
    builder, zeros = SegmentBuilder(spec, ENVIRONMENTS, 0.9, 0.0, False, **options), np.zeros(ENVIRONMENTS, np.float32)
    return [segment for i, step in enumerate(steps) for segment in builder.add(step, step.env_id % 3, zeros + i, zeros)]


def test_parts_of_segments_and_gathered_batches_equal_those_of_each_part_alone() -> None:
    steps = random_steps(1)
    segments = segments_of(SPEC, steps)
    bodies = [encode_segment(segment, SPEC) for segment in segments]
    for segment, body in zip(segments, bodies, strict=True):
        assert_equal_bits(decode_segment(body, SPEC), segment)
    count, batches = len(segments), {}
    indices = jnp.asarray(np.flatnonzero([segment.columns["priority"] for segment in segments]), jnp.int32)
    for name, spec in {"all": SPEC, **PARTS}.items():
        alone = [step if name == "all" else step._replace(observation=step.observation[name]) for step in steps]
        encoded = [encode_segment(segment, spec) for segment in segments_of(spec, alone)]
        frames, columns, corrupt = decode_segments(encoded, spec)
        assert (len(encoded), corrupt) == (count, {})
        store = insert_segments(create_store(spec, count), np.arange(count, dtype=np.int32), frames, columns)
        assert store_bytes(spec, count) == sum(array.nbytes for array in jax.tree.leaves(store))
        batches[name] = gather(store, indices, STACK)
    for name in PARTS:
        for at in ("observation_t", "observation_tpk"):
            np.testing.assert_array_equal(getattr(batches["all"], at)[name], getattr(batches[name], at))
        for column, values in batches[name].columns.items():
            np.testing.assert_array_equal(batches["all"].columns[column], values)
    assert batches["all"].observation_t["mask"].shape == (len(indices), 1, 3)
    masks = {
        step.observation["frames"][i, -1].tobytes(): step.observation["mask"][i, -1] for step in steps for i in range(4)
    }
    for frame, mask in zip(
        *(np.asarray(batches["all"].observation_tpk[name]) for name in ("frames", "mask")), strict=True
    ):
        np.testing.assert_array_equal(mask[0], masks[frame[-1].tobytes()])


def test_game_with_a_large_number_is_left_out_with_its_frames_and_masks() -> None:
    steps = random_steps(2)
    large = steps[20].observation["numbers"].copy()
    large[1] = 1e9
    steps[20] = steps[20]._replace(observation=steps[20].observation | {"numbers": large})
    alone = [step._replace(observation=step.observation["numbers"]) for step in steps]
    pairs = zip(
        *(segments_of(*each, largest_observation=1e8) for each in ((SPEC, steps), (PARTS["numbers"], alone))),
        strict=True,
    )
    for of_all, of_numbers in pairs:
        assert_equal_bits((of_all.frames["numbers"], of_all.columns), tuple(of_numbers))


@pytest.mark.parametrize(("name", "value"), [("mask", 2), ("numbers", np.nan), ("numbers", np.inf)])
def test_wrong_number_or_mask_from_a_stranger_is_refused(name: str, value: float) -> None:
    segment = segments_of(SPEC, random_steps(3))[0]
    body, layout = encode_segment(segment, SPEC), layout_of(SPEC)
    block = bytearray(zstandard.decompress(body[layout.columns_bytes :]))
    [part] = [part for part in layout.parts if part.name == name]
    np.ndarray(part.shape, part.dtype, block, part.start)[4] = value
    with pytest.raises(CorruptSegment, match="bad_frames"):
        decode_segment(body[: layout.columns_bytes] + zstandard.compress(bytes(block)), SPEC)
    segment.frames[name][4] = value
    with pytest.raises(CorruptSegment, match="bad_frames"):
        encode_segment(segment, SPEC)


def test_numbers_join_the_outputs_of_the_convolutions() -> None:
    plain = NetworkConfig(channels=(), kernel_sizes=(), strides=(), hidden_units=8)
    network, rng = QNetwork(plain, 3), np.random.default_rng(4)
    observation = {
        name: rng.integers(256, size=(6, *SPEC.parts[name][0])).astype(SPEC.parts[name].dtype) for name in PARTS
    }
    observation = {name: np.repeat(part[:, None], STACK, axis=1) for name, part in observation.items()}
    params = network.init(jax.random.key(1), observation)
    pixels = np.moveaxis(observation["frames"], 1, 3).reshape(6, -1) / np.float32(255)
    joint = np.concatenate([pixels, observation["numbers"].reshape(6, -1)], axis=1)
    of_both, of_vector = (np.asarray(network.apply(params, each)) for each in (observation, joint[:, None]))
    np.testing.assert_allclose(of_both, of_vector, rtol=1e-5)


CONVOLUTION: dict[str, Any] = {"channels": (4,), "kernel_sizes": (2,), "strides": (1,), "hidden_units": 8}


@pytest.mark.parametrize("make", [make_dqn, make_dpg])
def test_update_normalizes_the_numbers_and_learns_from_both_parts(make: Any) -> None:
    spec = SPEC if make is make_dqn else SPEC._replace(action=ActionSpec.continuous(2))
    config = Config(
        network=NetworkConfig(**CONVOLUTION, normalize_observations=True), learner=LearnerConfig(optimizer="adam")
    )
    algorithm, rng = make(config, spec), np.random.default_rng(5)
    store = create_store(spec, 4)
    frames = {
        name: rng.integers(2, size=part.shape) * (rng.random(part.shape) < 0.9) for name, part in store.frames.items()
    }
    frames = {name: jnp.asarray(part, store.frames[name].dtype) for name, part in frames.items()}
    offsets = jnp.ones_like(store.columns["bootstrap_offset"])
    store = store._replace(frames=frames, columns=store.columns | {"bootstrap_offset": offsets})
    indices = np.arange(2, 10, dtype=np.int32)[None]
    state = algorithm.init(jax.random.key(0))
    before = jax.tree.map(np.array, algorithm.acting_params(state))
    state, output = algorithm.update(state, store, indices, np.ones((1, 8), np.float32), 1.0)
    assert np.isfinite(output.priorities).all()
    numbers = np.asarray(gather(store, jnp.asarray(indices[0]), STACK).observation_t["numbers"]).reshape(8, -1)
    np.testing.assert_allclose(state.moments.mean, numbers.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.moments.variance, numbers.var(axis=0), rtol=1e-5, atol=1e-6)
    changed = jax.tree.map(lambda old, new: bool((old != new).any()), before, algorithm.acting_params(state))
    assert all(jax.tree.leaves(changed))
