"""Segments that consist of their number."""

from __future__ import annotations

from typing import Any

import numpy as np

from apex_jax.types import Columns, Segment
from tests.rigs.links import SPEC

PRIORITIES = 1_009  # different initial priorities
_STARTS = np.zeros(SPEC.slots, bool)
_STARTS[SPEC.frame_stack - 1 : -SPEC.n_step] = True
_COLUMNS: Columns = dict(
    n_step_return=np.zeros(SPEC.slots, np.float32),
    discount=_STARTS * np.float32(0.9),
    action=np.zeros(SPEC.slots, np.int32),
    bootstrap_offset=_STARTS.astype(np.uint8),
)


def priority_of(numbers: Any) -> Any:
    """Initial priority of the transitions of a segment; the learner adds less than 1."""
    return 1 + numbers % PRIORITIES


def segment_of(number: int) -> Segment:
    """A full segment whose pixels all have the value `number`."""
    priority = np.where(_STARTS, priority_of(number), 0).astype(np.float32)
    return Segment(np.full((SPEC.slots, *SPEC.frame_shape), number, np.float32), {"priority": priority, **_COLUMNS})


def number_in(frames: np.ndarray) -> int:
    return int(frames[0, 0])
