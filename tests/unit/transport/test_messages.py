"""Every kind of message keeps its number, and every field has a mark whose largest value can be sent."""

from typing import Any, get_type_hints

import msgpack
import numpy as np
import pytest

from apex_jax.transport import messages, wire
from apex_jax.types import Array, Buffer, Flag, Integer, Real, Text
from tests.rigs.messages import KIND_NUMBERS


def test_kinds_keep_their_numbers() -> None:
    assert {message.__name__: number for number, message in enumerate(wire.MESSAGES)} == KIND_NUMBERS
    assert wire.PROTOCOL_VERSION == 14


def test_every_marked_record_is_a_message() -> None:
    records = [value for value in vars(messages).values() if isinstance(value, type) and hasattr(value, "_fields")]
    marked = {record.__name__ for record in records if "Annotated[" in str(get_type_hints(record, include_extras=True))}
    unmarked = {"Rejoin", "Goodbye", "WeightsRequest", "SegmentRecord"}  # without fields; in types
    assert marked | unmarked == set(KIND_NUMBERS)


every_kind = pytest.mark.parametrize("kind", wire.MESSAGES, ids=KIND_NUMBERS)


def marks_of(kind: type) -> dict[str, Any]:
    """Returns the mark of each field, by name."""
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(kind, include_extras=True).items()}


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


@every_kind
def test_message_of_the_largest_values_fits_the_header(kind: Any) -> None:
    message = kind(*(largest(mark) for mark in marks_of(kind).values()))
    header = wire.encode(message)[0]
    assert len(header) <= wire.MAX_HEADER_BYTES
    assert type(wire.decode(wire.encode(message))) is kind
    shapes = sum(isinstance(item, list) for item in msgpack.unpackb(header))
    assert len(header) + 20 * shapes <= wire.MAX_HEADER_BYTES, "with the largest shapes"
