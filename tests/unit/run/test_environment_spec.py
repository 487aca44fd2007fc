"""Specification of `interface.json`: it is read as it was written, and nothing else is accepted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from apex_jax.host.errors import RunError
from apex_jax.run.environment_spec import (
    FILE_NAME,
    as_record,
    of_record,
    read_environment_spec,
    record_environment_spec,
)
from apex_jax.types import ActionSpec, EnvironmentSpec, ImageSpec, Part, SegmentSpec

PIXELS = SegmentSpec((84, 84), "uint8", 4, 40, 3, ActionSpec.discrete(6))
MASKED = SegmentSpec((9,), "float32", 1, 64, 5, ActionSpec.discrete(6)._replace(is_masked=True))
VECTORS = SegmentSpec((24,), "float32", 1, 64, 5, ActionSpec.continuous(2))


@pytest.mark.parametrize("environment_spec", [
    EnvironmentSpec(PIXELS, None, None, None),
    EnvironmentSpec(PIXELS, None, None, None, ImageSpec((84, 84), "float32", "HW", 0.0, 1.0), first_action=-3),
    EnvironmentSpec(MASKED, None, None, None, None, "int64", action_part=Part((), (2,), (2, 3), (0, -1))),
    EnvironmentSpec(VECTORS, (Part(("velocity",), (9, 2)), Part(("arms", 1), (3, 2))), (-2.0, 0.1), (2.0, 1e6)),
    EnvironmentSpec(VECTORS, (Part((), (2,), (3, 21), (0, -1)),), (-2.0, 0.1), (2.0, 1e6), None, "float64"),
])  # fmt: skip
def test_interface_is_read_as_it_was_written(environment_spec: EnvironmentSpec, tmp_path: Path) -> None:
    record_environment_spec(tmp_path, environment_spec)
    assert read_environment_spec(tmp_path) == environment_spec


@pytest.mark.parametrize(("change", "environment_spec"), [
    ({"spec": {"frame_stack": 0}}, PIXELS),
    ({"spec": {"frame_stack": True}}, PIXELS),
    ({"spec": {"frame_shape": [10**5, 10**5]}}, PIXELS),
    ({"spec": {"frame_dtype": "object"}}, PIXELS),
    ({"spec": {"action": ActionSpec.discrete(0)._asdict()}}, PIXELS),
    ({"low": [0.0], "high": [1.0]}, PIXELS),
    ({"spec": {"action": ActionSpec.discrete(6)._replace(is_masked=True)._asdict()}}, PIXELS),
    ({"action_part": {"path": [], "shape": [2], "counts": [2, 4], "starts": [0, 0]}}, PIXELS),
    ({"low": [math.nan, 0.0]}, VECTORS),
    ({"high": [1.0]}, VECTORS),
    ({"parts": [{"path": [], "shape": [23], "counts": [], "starts": []}]}, VECTORS),
    ({"parts": [{"path": [], "shape": [2], "counts": [25, -1], "starts": [0, 0]}]}, VECTORS),
    ({"parts": []}, VECTORS),
])  # fmt: skip
def test_values_that_no_environment_has_are_one_line_of_error(
    change: dict[str, Any], environment_spec: SegmentSpec, tmp_path: Path
) -> None:
    bounds = (None, None) if environment_spec is PIXELS else ((-1.0, -1.0), (1.0, 1.0))
    record = json.loads(json.dumps(as_record(EnvironmentSpec(environment_spec, None, *bounds))))
    assert of_record(record)
    record["spec"] |= change.pop("spec", {})
    (tmp_path / FILE_NAME).write_text(json.dumps(record | change))
    with pytest.raises(RunError, match=r"interface.json cannot be read: its|make a vector") as error:
        read_environment_spec(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spec": 1, "parts": null}', "\xff", '{"spec": {}, "parts": {}}'])
def test_cut_or_foreign_file_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(RunError, match=r"interface.json cannot be read: .*; start the run again") as error:
        read_environment_spec(tmp_path)
    assert "\n" not in str(error.value)
