"""Messages as ZMQ frames, according to the marks on the fields in `apex_jax.transport.messages`.

Frame 0 is a msgpack list: magic, protocol version, kind, then one item per field: the value of a scalar, the shape of
an array, the length of a buffer. One frame follows for each array and buffer: its raw bytes. The first three items and
the whole of `Refusal` are the same in every protocol version, so that incompatible releases can report it.

Peers are not trusted: `decode` checks every field, and raises no exception but `WireError`, whatever the bytes are. It
does not check what values mean, such as that an index exists or that a priority is finite.
"""

from __future__ import annotations

import functools
import math
import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, get_args, get_type_hints

import msgpack
import numpy as np
import zmq

from apex_jax.transport import messages
from apex_jax.types import Array, Buffer, Flag, Integer, Real, SegmentRecord, Text

MAGIC = "apex"
PROTOCOL_VERSION = 14
MAX_HEADER_BYTES = 2**16

Message: TypeAlias = (
    messages.ActorHello
    | messages.ActorWelcome
    | SegmentRecord
    | messages.SegmentAck
    | messages.EpisodeStatistics
    | messages.ActorStatus
    | messages.Rejoin
    | messages.Goodbye
    | messages.Refusal
    | messages.Finish
    | messages.LearnerHello
    | messages.LearnerWelcome
    | messages.Credit
    | messages.StreamedSegments
    | messages.IndexBatches
    | messages.PriorityUpdate
    | messages.CorruptSegments
    | messages.WeightsHello
    | messages.WeightsHeartbeat
    | messages.WeightsOffer
    | messages.WeightsRequest
    | messages.WeightsBody
)
MESSAGES: tuple[type[Message], ...] = get_args(Message)
"""Every kind of message; its index is its number in the protocol. A change requires a new PROTOCOL_VERSION."""

Frame: TypeAlias = bytes | memoryview | zmq.Frame


class WireError(ValueError):
    """The frames are not a valid message; `reason` is one of REASONS, for counting, and `detail` is for users.

    `version`: the peer's protocol version if it differs from ours, else None.
    """

    REASONS = (
        "wrong_frames",  # too few or too many
        "too_large",  # a header, array or buffer exceeds its limit
        "not_msgpack",  # the header is not msgpack
        "wrong_magic",  # the peer is another program
        "wrong_version",  # the peer is another version of this program
        "unknown_kind",  # no such message, or not expected on this socket
        "bad_field",  # wrong type or range of a scalar, or wrong number of fields
        "bad_shape",  # an array or buffer does not match its frame, its axes, or the message's other arrays
    )

    def __init__(self, reason: str, detail: str, version: int | None = None) -> None:
        assert reason in self.REASONS, reason
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.version = version


def encode_refusal(error: WireError) -> list[bytes | memoryview] | None:
    """Returns the answer to a peer of another protocol version, in that version; None if `error` is another error."""
    if error.version is None:
        return None
    reason = (
        f"the server speaks protocol version {PROTOCOL_VERSION}, this process version {error.version}:"
        " run the same release everywhere"
    )
    return _encode(messages.Refusal(reason=reason, final=True), error.version)


def encode(message: Message) -> list[bytes | memoryview]:
    """Returns the frames of a message; arrays and buffers are not copied, so they must not change until they are sent.

    Arrays of another memory layout or integer or float width are converted. Raises ValueError, with message, field,
    value and range, for a value that does not fit its mark: a bug of the sender, found before it is sent.
    """
    return _encode(message, PROTOCOL_VERSION)


def _encode(message: Message, version: int) -> list[bytes | memoryview]:
    schema = _SCHEMA_OF.get(type(message))
    if schema is None:
        raise ValueError(f"{type(message).__name__} is no message: it does not stand in MESSAGES")
    header: list[Any] = [MAGIC, version, schema.kind]
    frames: list[bytes | memoryview] = [b""]
    sizes: dict[str, int] = {}
    try:
        for (label, mark), value in zip(schema.fields, message, strict=True):
            if isinstance(mark, Array):
                array = _own_array(label, mark, value)
                header.append(list(array.shape))
                _check_shape(label, mark, header[-1], sizes)
                frames.append(array.data.cast("B") if array.size else b"")  # Python cannot cast an empty array
            elif isinstance(mark, Buffer):
                if type(value) is not bytes:
                    raise ValueError(f"{label} is {type(value).__name__}, must be bytes: {mark}")
                frames.append(value)
                header.append(len(value))
                _check_length(label, mark, header[-1])
            else:
                header.append(_own_scalar(mark, value))
                _check_scalar(label, mark, header[-1])
    except WireError as error:
        raise ValueError(error.detail) from None
    frames[0] = msgpack.packb(header, unicode_errors=_UNENCODABLE)
    return frames


def decode(frames: Sequence[Frame], expected: tuple[type[Message], ...] = MESSAGES) -> Message:
    """Returns the message in frames received from a peer, if it is of an `expected` kind.

    Arrays are read-only views that keep their frame alive. Buffers are bytes that keep nothing else alive: the frame
    itself if it is bytes, else a copy. Raises no exception but WireError.
    """
    if not frames:
        raise WireError("wrong_frames", "a message of no frames")
    header = _unpack(frames[0])
    schema = _schema_of(header, expected)
    items = header[_PREAMBLE:]
    if len(items) != len(schema.fields):
        raise WireError("bad_field", f"{schema.message.__name__} of {len(items)} fields, not {len(schema.fields)}")
    if len(frames) != schema.num_frames:
        raise WireError("wrong_frames", f"{schema.message.__name__} of {len(frames)} frames, not {schema.num_frames}")
    values: list[Any] = []
    sizes: dict[str, int] = {}
    frames_left = iter(frames[1:])
    for (label, mark), item in zip(schema.fields, items, strict=True):
        if isinstance(mark, Array):
            values.append(_read_array(label, mark, item, next(frames_left), sizes))
        elif isinstance(mark, Buffer):
            values.append(_read_buffer(label, mark, item, next(frames_left)))
        else:
            _check_scalar(label, mark, item)
            values.append(item)
    return schema.message(*values)


# Schemas of the messages, read from their marks at import --------------------------------------------------------

Mark: TypeAlias = Integer | Real | Flag | Text | Array | Buffer


class _Field(NamedTuple):
    label: str  # message.field
    mark: Mark


class _Schema(NamedTuple):
    kind: int
    message: type[Message]
    fields: tuple[_Field, ...]
    num_frames: int


def _read_marks(kind: int, message: type[Message]) -> _Schema:
    hints = get_type_hints(message, include_extras=True)
    fields = tuple(_Field(f"{message.__name__}.{name}", hints[name].__metadata__[0]) for name in message._fields)
    num_frames = 1 + sum(isinstance(field.mark, Array | Buffer) for field in fields)
    return _Schema(kind, message, fields, num_frames)


_SCHEMAS = tuple(_read_marks(kind, message) for kind, message in enumerate(MESSAGES))
_SCHEMA_OF: dict[type, _Schema] = {schema.message: schema for schema in _SCHEMAS}
_REFUSAL = _SCHEMA_OF[messages.Refusal].kind
_PREAMBLE = 3  # items of the header before the first field: magic, version, kind
_MAX_LIST = _PREAMBLE + max(len(schema.fields) for schema in _SCHEMAS)
_UNENCODABLE = "backslashreplace"  # a reason may contain a file name that is not valid Unicode


# The header ------------------------------------------------------------------------------------------------------


def _unpack(frame: Frame) -> list[Any]:
    data = _view(frame)
    if data.nbytes > MAX_HEADER_BYTES:
        raise WireError("too_large", f"a header of {data.nbytes} bytes, at most {MAX_HEADER_BYTES} are read")
    try:
        header = msgpack.unpackb(data, max_array_len=_MAX_LIST, max_map_len=0, max_bin_len=0, max_ext_len=0)
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise WireError("not_msgpack", f"a header that cannot be read: {type(error).__name__} {error}") from None
    if not isinstance(header, list) or header[:1] != [MAGIC]:
        raise WireError("wrong_magic", f"a header that does not begin with {MAGIC!r}: {reprlib.repr(header)}")
    return header


def _schema_of(header: list[Any], expected: tuple[type[Message], ...]) -> _Schema:
    version, kind = [*header, None, None][1:3]
    if type(version) is not int or (version != PROTOCOL_VERSION and kind != _REFUSAL):
        raise WireError(
            "wrong_version",
            f"the peer speaks protocol version {reprlib.repr(version)}, this process version {PROTOCOL_VERSION}:"
            " run the same release everywhere",
            version if type(version) is int and 0 <= version < 2**31 else None,
        )
    if type(kind) is not int or not 0 <= kind < len(MESSAGES):
        raise WireError("unknown_kind", f"message kind {reprlib.repr(kind)}, must be in [0, {len(MESSAGES)})")
    if MESSAGES[kind] not in expected:
        names = ", ".join(message.__name__ for message in expected)
        raise WireError("unknown_kind", f"{MESSAGES[kind].__name__} does not belong on this socket, only {names}")
    return _SCHEMAS[kind]


# Fields ----------------------------------------------------------------------------------------------------------


def _check_scalar(label: str, mark: Mark, value: object) -> None:
    fits = False  # exact types: in Python, True is an int and 1 equals 1.0
    if type(value) is int and isinstance(mark, Integer):
        fits = mark.low <= value <= mark.high
    elif type(value) is float and isinstance(mark, Real):
        fits = mark.low <= value <= mark.high and math.isfinite(value)
    elif type(value) is str and isinstance(mark, Text):
        fits = len(value.encode(errors=_UNENCODABLE)) <= mark.max_bytes
    elif type(value) is bool:
        fits = isinstance(mark, Flag)
    if not fits:
        raise WireError("bad_field", f"{label} is {reprlib.repr(value)}, must be {mark}")


def _check_shape(label: str, mark: Array, shape: object, sizes: dict[str, int]) -> None:
    """Checks a shape; `sizes` holds the size of each axis letter of the message so far."""
    if type(shape) is not list or len(shape) != len(mark.axes):
        raise WireError("bad_shape", f"{label} has shape {reprlib.repr(shape)}, must have axes {mark.axes}")
    for letter, size in zip(mark.axes, shape, strict=True):
        if type(size) is not int or size < 0:
            raise WireError("bad_shape", f"{label} has shape {reprlib.repr(shape)}: sizes are whole numbers from 0")
        if sizes.setdefault(letter, size) != size:
            raise WireError("bad_shape", f"{label} has {letter} = {size}, the array before it {sizes[letter]}")
    if max(shape) > mark.max_size or math.prod(shape) > mark.max_size:  # NumPy refuses 0 x 2**62
        raise WireError("too_large", f"{label} has shape {shape}, at most {mark.max_size} elements are read")


def _check_length(label: str, mark: Buffer, length: object) -> None:
    if type(length) is not int:
        raise WireError("bad_shape", f"{label} has length {reprlib.repr(length)}, must be a whole number")
    if length > mark.max_bytes:
        raise WireError("too_large", f"{label} has {length} bytes, at most {mark.max_bytes} are read")


def _read_array(label: str, mark: Array, shape: Any, frame: Frame, sizes: dict[str, int]) -> np.ndarray:
    _check_shape(label, mark, shape, sizes)
    data, dtype = _view(frame), _little_endian(mark.dtype)
    if data.nbytes != math.prod(shape) * dtype.itemsize:
        raise WireError("bad_shape", f"{label} has shape {shape}, its frame {data.nbytes} bytes of {dtype}")
    return np.ndarray(shape, dtype, data)


def _read_buffer(label: str, mark: Buffer, length: Any, frame: Frame) -> bytes:
    _check_length(label, mark, length)
    data = _view(frame)
    if data.nbytes != length:
        raise WireError("bad_shape", f"{label} has {length} bytes, its frame {data.nbytes}")
    return frame if isinstance(frame, bytes) else data.tobytes()


def _view(frame: Frame) -> memoryview:
    return memoryview(frame.buffer if isinstance(frame, zmq.Frame) else frame).toreadonly()


def _own_scalar(mark: Mark, value: object) -> object:
    """Converts NumPy scalars to Python scalars, and an int to a float if the mark is `Real`."""
    plain = value.item() if isinstance(value, np.generic) else value
    return float(plain) if isinstance(mark, Real) and type(plain) is int else plain


def _own_array(label: str, mark: Array, value: object) -> np.ndarray:
    """Returns a C-contiguous array of its mark's dtype. Raises ValueError if that cannot represent its integers."""
    dtype = _little_endian(mark.dtype)
    if not isinstance(value, np.ndarray) or not np.can_cast(value.dtype, dtype, "same_kind"):
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"{label} is {kind}, must be {mark}")
    array = np.asarray(value, dtype, order="C")
    if dtype.kind in "iu" and value.dtype != dtype and not np.array_equal(array, value):
        raise ValueError(f"{label} has values in [{value.min()}, {value.max()}], must be {mark}")
    return array


@functools.cache
def _little_endian(dtype: str) -> np.dtype:
    return np.dtype(dtype).newbyteorder("<")
