"""Specification of the codec of items: the columns that are accepted, and what travels in a segment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_jax.config import ActorConfig, Config, ReplayConfig
from apex_jax.host.errors import UsageError
from apex_jax.item_codec import DTYPES, columns_of, item_dtype, item_spec, segment_of
from apex_jax.segment_codec import decode_segment, encode_segment, max_body_bytes
from apex_jax.types import MAX_SEGMENT_BYTES

COLUMNS = "tokens:int32[5], reward:float32, image:uint8[2,3], done:bool"


def spec_of(columns: str, slots: int = 8):
    return item_spec(Config(actor=ActorConfig(segment_slots=slots), replay=ReplayConfig(columns=columns)))


def test_item_is_the_packed_row_of_its_columns_in_their_order() -> None:
    dtype = item_dtype(COLUMNS)
    assert dtype == np.dtype([("tokens", "<i4", 5), ("reward", "<f4"), ("image", "u1", (2, 3)), ("done", "?")])
    assert dtype.itemsize == 20 + 4 + 6 + 1
    assert item_dtype(" tokens : int32[5],reward:float32,image: uint8[2, 3],done:bool") == dtype


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_that_the_message_names_is_accepted(name: str) -> None:
    assert item_dtype(f"x:{name}")["x"] == np.dtype(name).newbyteorder("<")


@pytest.mark.parametrize(("columns", "message"), [
    ("x", "NAME:DTYPE"),
    ("x:float32,", "NAME:DTYPE"),
    ("x:float32[-1]", "NAME:DTYPE"),
    ("x:object", "x is object"),
    ("x:int8, x:int8", "x"),
    ("x:int8[0]", "1 to 33554432 bytes"),
    ("x:int8[99999999999999999999]", "1 to 33554432 bytes"),
    (",".join(f"column{i}:float32" for i in range(60)), "900 characters"),
])  # fmt: skip
def test_columns_that_cannot_be_understood_are_one_line_of_an_error(columns: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        item_dtype(columns)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("replay.columns=")


def test_longest_columns_fit_in_a_hello() -> None:
    columns = f"{'x' * 892}:float32"
    item_dtype(columns)
    assert len(Config(replay=ReplayConfig(columns=columns)).compatibility_key.encode()) <= 1024


def test_segment_larger_than_a_message_is_refused_with_the_most_slots_that_fit() -> None:
    with pytest.raises(UsageError, match=r"actor.segment_slots=64: must be at most \d+ .*1000000") as caught:
        spec_of("x:uint8[1000000]", 64)
    most = int(str(caught.value).split("at most ")[1].split()[0])
    assert max_body_bytes(spec_of("x:uint8[1000000]", most)) <= MAX_SEGMENT_BYTES
    assert max_body_bytes(spec_of("x:uint8[1000000]", most)._replace(slots=most + 1)) > MAX_SEGMENT_BYTES


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_decoded_items_and_priorities_equal_the_encoded_ones(count: int, seed: int) -> None:
    rng, spec, dtype = np.random.default_rng(seed), spec_of(COLUMNS), item_dtype(COLUMNS)
    items = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype)
    priorities = rng.random(count).astype(np.float32) + np.float32(0.1)
    frames, columns = decode_segment(encode_segment(segment_of(items, priorities, spec), spec), spec)
    assert (columns["priority"][:count] == priorities).all()
    assert not columns["priority"][count:].any()
    found = columns_of(frames[:count], dtype)
    assert list(found) == ["tokens", "reward", "image", "done"]
    for name, column in found.items():
        assert column.dtype == dtype[name].base
        assert column.shape == (count, *dtype[name].shape)
        assert column.tobytes() == items[name].tobytes()
        assert column.flags.owndata
