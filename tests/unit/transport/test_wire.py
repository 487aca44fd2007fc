"""Specification of `apex_jax.transport.wire` and of the messages: what is sent, and what is refused."""

from __future__ import annotations

import collections
import math
from typing import Any, get_type_hints

import msgpack
import numpy as np
import pytest
import zmq

from apex_jax.transport import messages, wire
from apex_jax.transport.messages import Finish, Refusal, Rejoin
from apex_jax.types import Array, Buffer, Flag, Integer, Real, SegmentRecord, Text
from tests.fuzz.messages import Fuzzer
from tests.rigs.links import CONFIG
from tests.rigs.messages import KIND_NUMBERS, speaking


def marks_of(message: Any) -> dict[str, Any]:
    hints = get_type_hints(message, include_extras=True)
    return {name: hints[name].__metadata__[0] for name in message._fields}


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    for name, a, b in zip(expected._fields, actual, expected, strict=True):
        if isinstance(b, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name
        else:
            assert (type(a), a) == (type(b), b), name


PYTHON_TYPES: dict[type, Any] = {Integer: int, Real: float, Flag: bool, Text: str, Array: np.ndarray, Buffer: bytes}


def assert_satisfies_marks(message: Any) -> None:
    """The law of each mark, written a second time."""
    sizes: dict[str, int] = {}
    for name, mark in marks_of(type(message)).items():
        value = getattr(message, name)
        assert type(value) is PYTHON_TYPES[type(mark)]
        match mark:
            case Integer(low, high) | Real(low, high):
                assert low <= value <= high
            case Text(max_bytes):
                assert len(value.encode()) <= max_bytes
            case Array(dtype, axes, max_size):
                assert (value.dtype, value.flags.writeable) == (np.dtype(dtype), False)
                assert value.size <= max_size
                assert all(sizes.setdefault(a, n) == n for a, n in zip(axes, value.shape, strict=True))
            case Buffer(max_bytes):
                assert len(value) <= max_bytes


def frames_of(message: Any) -> list[bytes]:
    return [bytes(frame) for frame in wire.encode(message)]


def with_item(message: Any, place: int | slice, item: Any) -> list[bytes]:
    """Frames whose header list a stranger has changed: 0 magic, 1 version, 2 kind, from 3 on the fields."""
    frames = frames_of(message)
    header = msgpack.unpackb(frames[0])
    header[place] = item
    return [msgpack.packb(header), *frames[1:]]


def received(frames: Any) -> Any:
    return wire.decode(frames)


def reason_of(frames: list[Any], **options: Any) -> str:
    """The reason for which frames are refused."""
    with pytest.raises(wire.WireError) as caught:
        wire.decode(frames, **options)
    assert caught.value.reason in wire.WireError.REASONS
    assert len(caught.value.detail) < 1000
    return caught.value.reason


INDICES, GENERATIONS = np.array([3, 1], np.int32), np.array([1, 2**32 - 1], np.uint32)
UPDATE: Any = messages.PriorityUpdate(INDICES, GENERATIONS, priorities=np.array([0.5, np.nan], np.float32))
SEGMENT: Any = SegmentRecord(1, 2, produced=3, transitions=4, body=b"body", crc=5)
STATUS: Any = messages.ActorStatus(steps_per_second=2.5, weights_version=3)
REFUSAL: Any = messages.Refusal(reason="why", final=True)


# The protocol ----------------------------------------------------------------------------------------------------


def test_frames_are_a_msgpack_list_and_the_raw_bytes() -> None:
    header, *bodies = frames_of(UPDATE)
    assert msgpack.unpackb(header) == ["apex", wire.PROTOCOL_VERSION, 15, [2], [2], [2]]
    assert bodies == [b"\3\0\0\0\1\0\0\0", b"\1\0\0\0\xff\xff\xff\xff", b"\0\0\0\x3f\0\0\xc0\x7f"]
    assert [msgpack.unpackb(frames_of(SEGMENT)[0]), frames_of(SEGMENT)[1:]] == [
        ["apex", wire.PROTOCOL_VERSION, 2, 1, 2, 3, 4, 4, 5],
        [b"body"],
    ]
    assert [msgpack.unpackb(frame) for frame in frames_of(messages.Rejoin())] == [["apex", wire.PROTOCOL_VERSION, 6]]


@pytest.mark.parametrize("kind", wire.MESSAGES)
def test_every_kind_survives_a_round_trip(kind: type) -> None:
    fuzzer = Fuzzer([kind], 0, CONFIG.compatibility_key)
    for _ in range(30):
        message = fuzzer.message_of(kind)
        frames = frames_of(message)
        unaligned = [memoryview(b"x" + frame)[1:] for frame in frames]
        for form in (frames, unaligned, [zmq.Frame(frame) for frame in frames]):
            decoded = wire.decode(form)
            assert_same(decoded, message)
            assert_satisfies_marks(decoded)


def test_arrays_and_buffers_are_sent_without_a_copy() -> None:
    _, indices, *_ = wire.encode(UPDATE)
    assert np.shares_memory(np.frombuffer(indices, np.uint8), UPDATE.indices)
    assert wire.encode(SEGMENT)[1] is SEGMENT.body


def test_received_arrays_are_read_only_views_and_buffers_pin_nothing() -> None:
    frames = [memoryview(bytearray(frame)) for frame in frames_of(UPDATE)]
    indices = received(frames).indices
    assert np.shares_memory(indices, np.frombuffer(frames[1], np.uint8))
    assert not indices.flags.writeable
    header, body = frames_of(SEGMENT)
    assert received([header, body]).body is body
    for form in (memoryview(b"x" * 1000 + body)[1000:], zmq.Frame(body)):
        assert type(received([header, form]).body) is bytes


def test_socket_takes_only_the_kinds_it_expects() -> None:
    frames = frames_of(SEGMENT)
    assert_same(wire.decode(frames, expected=(messages.ActorHello, SegmentRecord)), SEGMENT)
    assert reason_of(frames, expected=(messages.ActorHello, messages.Goodbye)) == "unknown_kind"


# Every kind of message --------------------------------------------------------------------------------------------


def test_kinds_keep_their_numbers() -> None:
    assert {message.__name__: number for number, message in enumerate(wire.MESSAGES)} == KIND_NUMBERS
    assert wire.PROTOCOL_VERSION == 14


def test_every_marked_record_is_a_message() -> None:
    records = [value for value in vars(messages).values() if isinstance(value, type) and hasattr(value, "_fields")]
    marked = {record.__name__ for record in records if "Annotated[" in str(get_type_hints(record, include_extras=True))}
    unmarked = {"Rejoin", "Goodbye", "WeightsRequest", "SegmentRecord"}  # without fields; in types
    assert marked | unmarked == set(KIND_NUMBERS)


def largest(mark: Any) -> Any:
    """Returns the value that takes the most room in the header; arrays and buffers stay small."""
    match mark:
        case Integer(_, high) | Real(_, high):
            return high
        case Flag():
            return True
        case Text(max_bytes):
            return "x" * max_bytes
        case Array(dtype, axes, _):
            return np.zeros((1,) * len(axes), dtype)
        case Buffer():
            return b"x"
    raise AssertionError(mark)


@pytest.mark.parametrize("kind", wire.MESSAGES, ids=KIND_NUMBERS)
def test_message_of_the_largest_values_fits_the_header(kind: Any) -> None:
    message = kind(*(largest(mark) for mark in marks_of(kind).values()))
    header = wire.encode(message)[0]
    assert len(header) <= wire.MAX_HEADER_BYTES
    assert type(wire.decode(wire.encode(message))) is kind
    shapes = sum(isinstance(item, list) for item in msgpack.unpackb(header))
    assert len(header) + 20 * shapes <= wire.MAX_HEADER_BYTES, "with the largest shapes"


# Own messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("message", "complaint"), [
    (SEGMENT._replace(sequence=0), r"SegmentRecord\.sequence is 0"),
    (SEGMENT._replace(crc=2**32), r"SegmentRecord\.crc is 4294967296"),
    (SEGMENT._replace(peer_id=True), r"SegmentRecord\.peer_id is True"),
    (SEGMENT._replace(peer_id=1.0), r"SegmentRecord\.peer_id is 1\.0"),
    (SEGMENT._replace(body="text"), r"SegmentRecord\.body is str"),
    (SEGMENT._replace(body=bytes(2**25 + 1)), r"SegmentRecord\.body has 33554433 bytes"),
    (STATUS._replace(steps_per_second=math.nan), r"ActorStatus\.steps_per_second is nan"),
    (STATUS._replace(steps_per_second=-0.5), r"ActorStatus\.steps_per_second is -0\.5"),
    (REFUSAL._replace(final=1), r"Refusal\.final is 1"),
    (REFUSAL._replace(reason="ü" * 2049), r"Refusal\.reason is .*max_bytes=4096"),
    (UPDATE._replace(indices=[1, 2]), r"PriorityUpdate\.indices is list"),
    (UPDATE._replace(indices=np.zeros(2)), r"PriorityUpdate\.indices is float64"),
    (UPDATE._replace(indices=np.array([2**31, 0])), r"indices has values in \[0, 2147483648\]"),
    (UPDATE._replace(indices=np.zeros((1, 2), np.int32)), r"PriorityUpdate\.indices has shape \[1, 2\]"),
    (UPDATE._replace(priorities=np.zeros(3, np.float32)), r"PriorityUpdate\.priorities has N = 3, .* 2"),
    (UPDATE._replace(indices=np.zeros(2**22 + 1, np.int32)), r"indices has shape \[4194305\]"),
    ((1, 2), "tuple is no message"),
])  # fmt: skip
def test_wrong_field_of_an_outgoing_message_is_an_error_with_its_name(message: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        wire.encode(message)
    assert type(caught.value) is ValueError  # a loop that counts the WireErrors of its peers must not swallow it


def test_outgoing_arrays_and_scalars_are_converted_to_the_wire_format() -> None:
    square = np.arange(16, dtype=np.int64).reshape(4, 4)
    priorities = np.array([0.25, 0.5])
    message = UPDATE._replace(indices=square[::2, 1], generations=np.zeros(2, ">u4"), priorities=priorities)
    expected = UPDATE._replace(
        indices=np.array([1, 9], np.int32), generations=np.zeros(2, np.uint32), priorities=np.float32(priorities)
    )
    assert_same(wire.decode(wire.encode(message)), expected)
    assert_same(wire.decode(wire.encode(STATUS._replace(steps_per_second=2))), STATUS._replace(steps_per_second=2.0))


def test_invalid_unicode_in_a_reason_is_sent_as_escapes() -> None:
    assert received(wire.encode(REFUSAL._replace(reason="no file \udcff"))).reason == r"no file \udcff"


# Strangers -------------------------------------------------------------------------------------------------------


def test_number_of_frames_is_checked() -> None:
    frames = frames_of(UPDATE)
    for wrong in ([], frames[:1], frames[:-1], [*frames, b""], [*frames, *frames]):
        assert reason_of(wrong) == "wrong_frames"


@pytest.mark.parametrize("header", [
    b"", b"\xc1", b"\x93\xa4apex", b"\x81\x90\x01", b"\xc4\x01a", b"\x93\xa4apex\x01\xa2\xff\xfe",
    msgpack.packb(["apex", 1, 6]) + b"\0", msgpack.packb(["apex", 1, 6, {1: 1}]), msgpack.packb(["apex"] * 100),
    b"\x91" * 60_000, b"\x9f" * 60_000, b"\xdc\x00\x0b" * 20_000,  # lists in lists
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01", b"\x93\xa4apex\x01\xd6\xff\0\0\0\0", b"\x93\xa4apex\x01\xc7\x0c\xff" + b"\xff" * 12,
])  # fmt: skip
def test_header_that_cannot_be_read_is_refused(header: bytes) -> None:
    assert reason_of([header]) == "not_msgpack"


def test_header_beyond_its_limit_is_refused_unread() -> None:
    assert reason_of([bytes(wire.MAX_HEADER_BYTES)]) == "not_msgpack"
    assert reason_of([bytes(wire.MAX_HEADER_BYTES + 1)]) == "too_large"


@pytest.mark.parametrize(("reason", "header"), [
    *(("wrong_magic", header) for header in (5, None, "apex", [], ["apexx", 1, 6], ["ape", 1, 6], [["apex"], 1, 6])),
    ("wrong_version", ["apex"]),
    *(("unknown_kind", ["apex", wire.PROTOCOL_VERSION, *kind])
      for kind in ([], [-1], [len(KIND_NUMBERS)], [2**63], [True], [6.0], ["6"], [None], [[6]])),
])  # fmt: skip
def test_messages_of_other_programs_and_releases_are_refused(reason: str, header: object) -> None:
    assert reason_of([msgpack.packb(header)]) == reason


@pytest.mark.parametrize("version", [0, 1, 2**64 - 1, -1, True, 1.0, "1", None, [1]])
def test_other_version_is_refused_with_both_versions(version: object) -> None:
    with pytest.raises(wire.WireError, match="wrong_version") as caught:
        wire.decode([msgpack.packb(["apex", version, "of another", "form", 1, 2, 3])])
    assert f"version {version!r}, this process version {wire.PROTOCOL_VERSION}" in caught.value.detail


@pytest.mark.parametrize(("message", "place", "reason", "values"), [
    (SEGMENT, 4, "bad_field", (0, 2**48 + 1, True, 1.0, "1", None, [1])),
    (SEGMENT, 3, "bad_field", (-1, 2**63)),
    (SEGMENT, 6, "bad_field", (2**32 + 1,)),
    (SEGMENT, 8, "bad_field", (2**32 + 1,)),
    (STATUS, 3, "bad_field", (1, True, math.nan, math.inf, -math.inf, -1e-9, 1.1e9)),
    (REFUSAL, 3, "bad_field", ("x" * 4097, "ü" * 2049, 1)),
    (REFUSAL, 4, "bad_field", (0, 1)),
    (SEGMENT, 7, "bad_shape", (-1, 0, 3, 5, None, True, 4.0, "4", [4])),
    (SEGMENT, 7, "too_large", (2**25 + 1, 2**64 - 1)),
    (UPDATE, 3, "bad_shape", (2, None, "2", [], [1, 2], [-2], [2.0], [True], [None], [[2]], [1], [3])),
])  # fmt: skip
def test_item_of_a_header_that_does_not_fit_its_mark_or_frame_is_refused(
    message: Any, place: int, reason: str, values: tuple[Any, ...]
) -> None:
    for value in values:
        assert reason_of(with_item(message, place, value)) == reason, value


@pytest.mark.parametrize("message", [SEGMENT, UPDATE, messages.Rejoin()])
def test_number_of_fields_is_checked(message: Any) -> None:
    assert reason_of(with_item(message, slice(99, None), [1])) == "bad_field"
    assert reason_of(with_item(message, slice(-1, None), [])) == ("bad_field" if message else "unknown_kind")


@pytest.mark.parametrize("shape", [[0, 2**63], [2**62, 0], [2**32, 2**32], [2**12, 2**11], [2**21, 3]])
def test_product_of_a_shape_cannot_overflow_nor_hide_a_negative_size(shape: list[int]) -> None:
    message = Fuzzer([messages.EpisodeStatistics], 3, "").message_of(messages.EpisodeStatistics)
    assert reason_of([*with_item(message, 7, shape)[:-1], b""]) in ("too_large", "bad_shape")
    assert reason_of([*with_item(message, 7, [-2, -2])[:-1], bytes(16)]) == "bad_shape"


def test_axis_letter_has_one_size_in_a_message() -> None:
    header, indices, generations, priorities = with_item(UPDATE, 4, [1])
    assert reason_of([header, indices, generations[:4], priorities]) == "bad_shape"


# Fuzz ------------------------------------------------------------------------------------------------------------


def test_damaged_frames_are_refused_or_satisfy_their_marks() -> None:
    fuzzer = Fuzzer(wire.MESSAGES, 1, CONFIG.compatibility_key)
    reasons = collections.Counter[str]()
    for _ in range(6_000):
        try:
            message = wire.decode(fuzzer.next())
        except wire.WireError as error:
            reasons[error.reason] += 1
        else:
            assert_satisfies_marks(message)
    assert set(reasons) == set(wire.WireError.REASONS)  # the damage was of every sort
    assert reasons.total() > 2_400


def test_a_refusal_can_be_read_whatever_the_version() -> None:
    refusal = Refusal("because", True)
    for version in (0, 1, 2, 99):
        assert wire.decode(speaking(version, refusal)) == refusal
    for message in (Finish("over"), Rejoin()):
        with pytest.raises(wire.WireError, match="wrong_version"):
            wire.decode(speaking(1, message))
