"""What a snapshot holds is checked value by value before it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from apex_jax.replay.file_heads import CorruptFile
from apex_jax.replay.ledger import COLUMNS
from apex_jax.replay.saved_state import unpack_state
from tests.rigs.links import SPEC


def good_facts() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    world_state = np.random.default_rng(0).bit_generator.state
    facts: dict[str, Any] = {
        "event": 1, "inserted_segments": 1, "priority_exponent": 0.6, "max_priority": 1.0, "random_state": world_state,
        "limiter": {"inserted": 1, "sampled": 0, "ratio": [0.0, 1.0]}, "environment_steps": 1,
        "welcomed": 1, "refused": {}, "forgotten": {},
    }  # fmt: skip
    arrays = {
        "insertion_ids": np.ones(1, np.int64),
        "leaves": np.ones((1, SPEC.slots)),
        "ages_seconds": np.zeros(1),
        "accounts": np.ones((1, COLUMNS), np.int64),
    }
    return facts, arrays


@pytest.mark.parametrize(("name", "value"), [
    ("event", -1), ("event", 1.0), ("event", True), ("event", 2**70), ("inserted_segments", "1"),
    ("priority_exponent", -0.5), ("max_priority", float("nan")), ("max_priority", 1), ("environment_steps", None),
    ("environment_steps", -5), ("welcomed", []), ("limiter", None), ("limiter", {"inserted": 1}),
    ("limiter", {"inserted": 1, "sampled": 0, "ratio": "x"}), ("refused", {"because": 1}), ("refused", [1]),
    ("refused", {"bad_checksum": -1}), ("forgotten", {"stored": 1.5}), ("random_state", None), ("random_state", {}),
    ("random_state", {"bit_generator": "MT19937", "state": {}}),
    ("random_state", {"bit_generator": "PCG64", "state": {"state": 2**128, "inc": 1}, "has_uint32": 0, "uinteger": 0}),
    ("random_state", {"bit_generator": "PCG64", "state": {"state": 1, "inc": "1"}, "has_uint32": 0, "uinteger": 0}),
    ("random_state", {"bit_generator": "PCG64", "state": {"state": 1, "inc": 1}, "has_uint32": 2, "uinteger": 0}),
])  # fmt: skip
def test_impossible_fact_is_damage(name: str, value: Any) -> None:
    facts, arrays = good_facts()
    assert unpack_state(facts, arrays, SPEC.slots).event == 1
    with pytest.raises((CorruptFile, KeyError, TypeError, AttributeError)):
        unpack_state({**facts, name: value}, arrays, SPEC.slots)


@pytest.mark.parametrize(("name", "value"), [
    ("insertion_ids", np.zeros(2, np.int64)), ("insertion_ids", np.full(1, 2)), ("insertion_ids", np.full(1, -1)),
    ("insertion_ids", np.ones(1)),
    ("leaves", np.ones((1, SPEC.slots + 1))), ("leaves", np.full((1, SPEC.slots), np.nan)), ("leaves", np.ones(1)),
    ("leaves", np.full((1, SPEC.slots), np.inf)), ("leaves", np.full((1, SPEC.slots), -1.0)),
    ("ages_seconds", np.full(1, np.nan)), ("ages_seconds", np.zeros(2)), ("accounts", np.ones((1, 3), np.int64)),
    ("accounts", np.full((1, COLUMNS), -1)), ("accounts", np.ones(9, np.int64)),
])  # fmt: skip
def test_impossible_array_is_damage(name: str, value: np.ndarray) -> None:
    facts, arrays = good_facts()
    with pytest.raises(CorruptFile):
        unpack_state(facts, {**arrays, name: value}, SPEC.slots)
