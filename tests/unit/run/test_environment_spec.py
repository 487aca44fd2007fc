"""Specification of `interface.json`: it is read as it was written, and nothing else is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex_jax.host.errors import RunError
from apex_jax.run.environment_spec import FILE_NAME, read_environment_spec, record_environment_spec
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


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spec": 1, "parts": null}', "\xff", '{"spec": {}, "parts": {}}'])
def test_cut_or_foreign_file_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(RunError, match=r"interface.json cannot be read: .*; start the run again") as error:
        read_environment_spec(tmp_path)
    assert "\n" not in str(error.value)
