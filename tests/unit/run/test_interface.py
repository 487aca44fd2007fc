"""Specification of `interface.json`: it is read as it was written, and nothing else is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apex_jax.host.errors import RunError
from apex_jax.run.interface import FILE_NAME, as_record, read_interface, record_interface
from apex_jax.types import ActionSpec, Interface, Part, SegmentSpec

PIXELS = SegmentSpec((84, 84), "uint8", 4, 40, 3, ActionSpec.discrete(6))
VECTORS = SegmentSpec((24,), "float32", 1, 64, 5, ActionSpec.continuous(2))


@pytest.mark.parametrize("interface", [
    Interface(PIXELS, None, None, None),
    Interface(VECTORS, (Part(("velocity",), (9,)), Part(("arms", 1), (3, 2))), (-2.0, 0.1), (2.0, 1e6)),
    Interface(VECTORS, (Part((), (2,), (3, 4), (0, -1)),), None, None),
])  # fmt: skip
def test_interface_is_read_as_it_was_written(interface: Interface, tmp_path: Path) -> None:
    record_interface(tmp_path, interface)
    assert read_interface(tmp_path) == interface


def test_shapes_by_name_that_earlier_versions_wrote_are_parts_in_their_order(tmp_path: Path) -> None:
    record = as_record(Interface(VECTORS, None, None, None)) | {"parts": {"velocity": [9], "height": []}}
    (tmp_path / FILE_NAME).write_text(json.dumps(record))
    assert read_interface(tmp_path).parts == (Part(("velocity",), (9,)), Part(("height",), ()))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spec": 1, "parts": null}', "\xff", '{"spec": {}, "parts": {}}'])
def test_cut_or_foreign_file_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(RunError, match=r"interface.json cannot be read: .*; start the run again") as error:
        read_interface(tmp_path)
    assert "\n" not in str(error.value)
