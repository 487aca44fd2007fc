"""Specification of `apex_jax.segment_codec`."""

import collections
import dataclasses
import functools
import operator
import zlib
from typing import Any

import envpool
import numpy as np
import pytest
import zstandard

from apex_jax import segment_codec
from apex_jax.config import Config
from apex_jax.types import ActionSpec, Columns, Segment, SegmentRecord, SegmentSpec, joined, map_parts, named_parts
from tests.rigs.agents import assert_equal_bits

SMALL = SegmentSpec((5, 7), "uint8", frame_stack=4, slots=16, n_step=3, action=ActionSpec.discrete(6))
VECTOR = SMALL._replace(frame_shape=(3,), frame_dtype="float32")
SEVERAL = SMALL._replace(numbers=3, action=SMALL.action._replace(is_masked=True))


def random_columns(rng: np.random.Generator, spec: SegmentSpec) -> Columns:
    """Columns in which most slots that can start a transition do, at least one of them."""
    can_start = np.zeros(spec.slots, bool)
    can_start[spec.frame_stack - 1 : spec.slots - spec.n_step] = True
    starts = can_start & (rng.random(spec.slots) < 0.8)
    starts[rng.choice(np.flatnonzero(can_start))] = True
    columns = dict(
        priority=rng.random(spec.slots, np.float32) + np.float32(1e-6),
        n_step_return=rng.normal(size=spec.slots).astype(np.float32),
        discount=rng.choice(np.array([0, 0.5, 1], np.float32), spec.slots),
        action=rng.integers(spec.action.num_actions, size=spec.slots, dtype=np.int32),
        bootstrap_offset=rng.integers(1, spec.n_step + 1, spec.slots, dtype=np.uint8),
    )
    return {name: np.where(starts, column, np.zeros_like(column)) for name, column in columns.items()}


def random_segment(seed: int, spec: SegmentSpec) -> Segment:
    """A segment of noise, which zstd cannot compress."""
    rng, parts = np.random.default_rng(seed), {}
    for name, part in spec.parts.items():
        shape, levels = (spec.slots, *part.shape), 2 if name == "mask" else 256
        pixels = rng.integers(levels, size=shape, dtype=np.uint8)
        parts[name] = pixels if part.dtype == "uint8" else rng.normal(size=shape).astype(np.float32)
    return Segment(joined(parts), random_columns(rng, spec))


@functools.cache
def pong_frames(size: int) -> np.ndarray:
    """64 consecutive newest frames of one game of Pong, in play."""
    environment = envpool.make_gymnasium("Pong-v5", num_envs=1, seed=7, img_height=size, img_width=size)
    environment.reset()
    rng = np.random.default_rng(7)
    observations = [environment.step(rng.integers(6, size=1, dtype=np.int32))[0] for _ in range(124)]
    environment.close()
    return np.concatenate(observations)[-64:, -1]


def block_of(segment: Segment, spec: SegmentSpec) -> bytes:
    """The compressed pixels of a body."""
    return segment_codec.encode_segment(segment, spec)[segment_codec.layout_of(spec).columns_bytes :]


def columns_of(segment: Segment, spec: SegmentSpec) -> bytes:
    return segment_codec.encode_segment(segment, spec)[: segment_codec.layout_of(spec).columns_bytes]


def reason_of(body: bytes, spec: SegmentSpec) -> str:
    """The reason for which a body is refused."""
    with pytest.raises(segment_codec.CorruptSegment) as caught:
        segment_codec.decode_segment(body, spec)
    assert caught.value.reason in segment_codec.CorruptSegment.REASONS
    return caught.value.reason


def body_with(spec: SegmentSpec = SMALL, **changes: Any) -> bytes:
    """A body in which single values of columns, (slot, value), were changed after encoding, as only a stranger can."""
    segment = random_segment(0, spec)
    data = bytearray(segment_codec.encode_segment(segment, spec))
    offset = 0
    for name, column in segment.columns.items():
        if name in changes:
            slot, value = changes[name]
            start = offset + slot * column.itemsize
            data[start : start + column.itemsize] = column.dtype.type(value).tobytes()
        offset += column.nbytes
    return bytes(data)


# Round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "limit"), [(84, 80), (42, 60)])
def test_pong_frames_come_back_bit_for_bit_from_few_bytes(size: int, limit: int) -> None:
    spec = SegmentSpec((size, size), "uint8", frame_stack=4, slots=64, n_step=3, action=ActionSpec.discrete(6))
    segment = Segment(pong_frames(size), random_columns(np.random.default_rng(0), spec))
    assert len(np.unique(segment.frames, axis=0)) > 32  # a game in play, not a still picture
    body = segment_codec.encode_segment(segment, spec)
    assert_equal_bits(segment_codec.decode_segment(body, spec), segment)
    assert len(body) / 64 < limit


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("frame_shape", [(84, 84), (42, 42), (5, 7), (2, 5), (3,), (1,)])
@pytest.mark.parametrize("frame_dtype", ["uint8", "float32"])
def test_noise_of_any_frame_shape_comes_back_bit_for_bit(seed: int, frame_shape: Any, frame_dtype: str) -> None:
    spec = SMALL._replace(frame_shape=frame_shape, frame_dtype=frame_dtype)
    segment = random_segment(seed, spec)
    assert_equal_bits(segment_codec.decode_segment(segment_codec.encode_segment(segment, spec), spec), segment)


@pytest.mark.parametrize("spec", [SMALL, VECTOR, SEVERAL])
def test_body_has_the_layout_of_the_module_docstring(spec: SegmentSpec) -> None:
    segment = random_segment(1, spec)
    body = segment_codec.encode_segment(segment, spec)
    columns = b"".join(column.astype(column.dtype.newbyteorder("<")).tobytes() for column in segment.columns.values())
    assert body.startswith(columns)
    parts = [part.tobytes() for part in named_parts(segment.frames).values()]
    assert zstandard.decompress(body[len(columns) :]) == b"".join(parts)


def test_record_has_the_body_its_checksum_and_the_number_of_its_transitions() -> None:
    segment = random_segment(3, SMALL)
    record = segment_codec.encode_record(segment, SMALL, peer_id=7, sequence=2, produced=11)
    body = segment_codec.encode_segment(segment, SMALL)
    assert record == SegmentRecord(7, 2, 11, int((segment.columns["priority"] > 0).sum()), body, zlib.crc32(body))


def test_segment_inside_a_larger_message_is_read_at_any_alignment() -> None:
    segment = random_segment(3, VECTOR)
    body = segment_codec.encode_segment(segment, VECTOR)
    for padding in range(1, 5):
        message = bytes(padding) + body + b"behind"
        view = memoryview(message)[padding : padding + len(body)]
        assert_equal_bits(segment_codec.decode_segment(view, VECTOR), segment)


@pytest.mark.parametrize("spec", [SMALL, VECTOR, SEVERAL])
def test_corrupt_segment_among_others_is_zeros_with_its_reason(spec: SegmentSpec) -> None:
    segments = [random_segment(seed, spec) for seed in range(3)]
    bodies = [segment_codec.encode_segment(segment, spec) for segment in segments]
    bodies[1] = bodies[1][:-1]
    frames, columns, corrupt = segment_codec.decode_segments(bodies, spec)
    assert corrupt == {1: "bad_frames"}
    for number in (0, 2):
        at = operator.itemgetter(number)
        assert_equal_bits(Segment(map_parts(at, frames), map_parts(at, columns)), segments[number])
    assert not any(part[1].any() for part in named_parts(frames).values())
    assert not any(column[1].any() for column in columns.values())


# Guards ----------------------------------------------------------------------------------------------------------

SIGNALLING_NAN = np.uint32(0x7FA00000).view(np.float32)


@pytest.mark.parametrize(("reason", "changes"), [
    *(("bad_priority", {"priority": (5, value)}) for value in (-1e-9, np.nan, SIGNALLING_NAN, np.inf, -np.inf)),
    *(("bad_return", {"n_step_return": (0, value)}) for value in (np.nan, SIGNALLING_NAN, np.inf, -np.inf)),
    *(("bad_discount", {"discount": (15, value)}) for value in (-1e-9, 1.0001, np.nan, np.inf)),
    *(("bad_action", {"action": (9, value)}) for value in (-1, 6, 2**31 - 1, -(2**31))),
    *(("bad_start", {"priority": (slot, 1)}) for slot in (0, 2, 13, 15)),
    *(("bad_bootstrap", {"priority": (8, 1), "bootstrap_offset": (8, value)}) for value in (0, 4, 255)),
])  # fmt: skip
def test_value_outside_its_range_is_refused(reason: str, changes: Any) -> None:
    assert reason_of(body_with(**changes), SMALL) == reason


@pytest.mark.parametrize("changes", [
    {"priority": (5, 3e38), "bootstrap_offset": (5, 1)}, {"priority": (3, 1e-45), "bootstrap_offset": (3, 3)},
    {"priority": (12, 1), "bootstrap_offset": (12, 3)}, {"priority": (8, 0), "bootstrap_offset": (8, 255)},
    {"priority": (0, -0.0)}, {"n_step_return": (0, -3e38)}, {"discount": (15, 1)}, {"action": (15, 5)},
])  # fmt: skip
def test_value_at_the_edge_of_its_range_is_read(changes: Any) -> None:
    columns = segment_codec.decode_columns(body_with(**changes), SMALL)
    for name, (slot, value) in changes.items():
        column = columns[name]
        assert column[slot] == column.dtype.type(value)


def test_without_a_stack_all_but_the_last_n_slots_can_start_a_transition() -> None:
    spec = SMALL._replace(frame_stack=1, n_step=1)
    bodies = {slot: body_with(spec, priority=(slot, 1), bootstrap_offset=(slot, 1)) for slot in (0, 14, 15)}
    for slot in (0, 14):
        assert segment_codec.decode_columns(bodies[slot], spec)["priority"][slot] == 1
    assert reason_of(bodies[15], spec) == "bad_start"


def test_segment_in_which_no_transition_starts_is_refused() -> None:
    segment = random_segment(6, SMALL)
    body = bytearray(segment_codec.encode_segment(segment, SMALL))
    body[: 4 * SMALL.slots] = bytes(4 * SMALL.slots)
    assert reason_of(bytes(body), SMALL) == "no_transition"
    columns = segment.columns | {"priority": np.zeros(SMALL.slots, np.float32)}
    with pytest.raises(segment_codec.CorruptSegment, match="no_transition"):
        segment_codec.encode_segment(segment._replace(columns=columns), SMALL)


def test_length_is_limited_by_the_columns_and_compressed_noise() -> None:
    body = segment_codec.encode_segment(random_segment(7, SMALL), SMALL)
    column_bytes = segment_codec.layout_of(SMALL).columns_bytes
    frame_bytes = SMALL.frame_bytes * SMALL.slots
    bound = column_bytes + frame_bytes + frame_bytes // 256 + 18
    for length in (0, 1, column_bytes - 1, column_bytes, bound + 1, 2 * bound):
        assert reason_of(body.ljust(length, b"\0")[:length], SMALL) == "bad_length"
    assert len(body) <= bound
    assert reason_of(body.ljust(bound, b"\0"), SMALL) == "bad_frames"


@pytest.mark.parametrize("is_normalized", [False, True])
def test_observation_that_an_actor_must_not_send_is_refused_unless_it_is_normalized(is_normalized: bool) -> None:
    settings = Config()
    network = dataclasses.replace(settings.network, normalize_observations=is_normalized)
    segment = random_segment(10, VECTOR)
    segment.frames[3, 1] = 1.01 * segment_codec.LARGEST_OBSERVATION
    body = segment_codec.encode_segment(segment, VECTOR)
    largest = segment_codec.value_limits(settings.replace(network=network)).observation
    limits = segment_codec.NO_LIMITS._replace(observation=largest)
    _, _, corrupt = segment_codec.decode_segments([body], VECTOR, limits)
    assert corrupt == ({} if is_normalized else {0: "bad_frames"})


BLACK = np.zeros((2048, 5, 7), np.uint8)  # of which a small block expands to more than a smaller spec has


@pytest.mark.parametrize(("slots", "reason"), [(15, "bad_frames"), (17, "bad_length"), (2048, "bad_frames")])
def test_frames_of_another_number_of_slots_are_refused(slots: int, reason: str) -> None:
    other = SMALL._replace(slots=slots)
    foreign = random_segment(8, other)
    block = block_of(foreign._replace(frames=BLACK) if slots == 2048 else foreign, other)
    assert reason_of(columns_of(random_segment(8, SMALL), SMALL) + block, SMALL) == reason


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e38, 1.01 * segment_codec.LARGEST_SQUARED])
def test_vector_observation_that_is_not_finite_or_huge_is_refused_on_both_sides(value: float) -> None:
    segment = random_segment(10, VECTOR)
    columns = columns_of(segment, VECTOR)
    segment.frames[3, 1] = value
    with pytest.raises(segment_codec.CorruptSegment, match="bad_frames"):
        segment_codec.encode_segment(segment, VECTOR)
    assert reason_of(columns + zstandard.compress(segment.frames.tobytes()), VECTOR) == "bad_frames"


@pytest.mark.parametrize("size", [2**62, 2**31, 0])
def test_block_with_a_wrong_size_or_trailing_bytes_is_refused(size: int) -> None:
    segment = random_segment(9, SMALL)
    block = b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + bytes(64)
    assert reason_of(columns_of(segment, SMALL) + block, SMALL) == "bad_frames"
    body = segment_codec.encode_segment(segment._replace(frames=BLACK[:16]), SMALL)
    assert reason_of(body + b"\0", SMALL) == "bad_frames"


# Fuzz ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SMALL, VECTOR, SEVERAL, SMALL._replace(frame_shape=(42, 42), slots=64)])
def test_damaged_body_is_refused_or_satisfies_every_rule(spec: SegmentSpec) -> None:
    rng = np.random.default_rng(14)
    segment = random_segment(14, spec)
    if spec.frame_shape == (42, 42):
        segment = segment._replace(frames=pong_frames(42))  # compresses well: most of it are instructions to zstd
    body = segment_codec.encode_segment(segment, spec)
    reasons = collections.Counter[str]()
    for _ in range(2000):
        damaged = damage(rng, body)
        try:
            frames = segment_codec.decode_frames(damaged, spec)
            columns = segment_codec.decode_columns(damaged, spec)
        except segment_codec.CorruptSegment as error:
            reasons[error.reason] += 1
        else:
            assert_lawful(columns, spec)
            parts = named_parts(frames)
            assert all(np.isfinite(part).all() for part in parts.values())
            assert parts.get("mask", np.zeros(1)).max() <= 1
    assert reasons.total() > 200


def damage(rng: np.random.Generator, body: bytes) -> bytes:
    """Flips bits, cuts, lengthens, or replaces a run by noise."""
    data, at = bytearray(body), int(rng.integers(len(body)))
    match rng.integers(4):
        case 0:
            for position in rng.integers(len(data), size=rng.integers(1, 9)):
                data[position] ^= 1 << int(rng.integers(8))
        case 1:
            del data[at : at + int(rng.integers(1, 100))]
        case 2:
            data[at:at] = rng.bytes(int(rng.integers(1, 100)))
        case _:
            data[at : at + 20] = rng.bytes(min(20, len(data) - at))
    return bytes(data)


def assert_lawful(columns: Columns, spec: SegmentSpec) -> None:
    """The laws of `Columns`, slot by slot."""
    started = 0
    for slot in range(spec.slots):
        priority, n_step_return, discount, action, offset = (column[slot].item() for column in columns.values())
        assert 0 <= priority < float("inf")
        assert abs(n_step_return) < float("inf")
        assert 0 <= discount <= 1
        assert 0 <= action < spec.action.num_actions
        if priority > 0:
            started += 1
            assert spec.frame_stack - 1 <= slot < spec.slots - spec.n_step
            assert 1 <= offset <= spec.n_step
    assert started > 0
