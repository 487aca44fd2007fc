"""The columns of a segment, and the actions that a specification allows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax import segment_codec
from apex_jax.agent.frame_store import create_store, gather, insert_segments
from apex_jax.segment_codec import CorruptSegment, decode_segment, encode_segment
from apex_jax.types import Column, SegmentSpec
from tests.rigs.agents import CONTINUOUS
from tests.rigs.links import SPEC, segment_of


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


def test_actions_of_any_shape_travel_bit_for_bit() -> None:
    spec = SPEC._replace(action=CONTINUOUS)
    action = np.random.default_rng(0).uniform(-1, 1, (spec.slots, 3)).astype(np.float32)
    np.testing.assert_array_equal(travelled(spec, action=action).columns["action"][0], action[1])


@pytest.mark.parametrize("value", [1.0001, -1.0001, np.nan, np.inf])
def test_an_action_outside_its_bounds_is_refused(value: float) -> None:
    action = np.zeros((SPEC.slots, 3), np.float32)
    action[4, 2] = value
    with pytest.raises(CorruptSegment, match="bad_action"):
        travelled(SPEC._replace(action=CONTINUOUS), action=action)
