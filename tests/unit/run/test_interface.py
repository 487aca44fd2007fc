"""Specification of `interface.json`: it is read as it was written, and nothing else is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex_jax.host.errors import RunError
from apex_jax.run.interface import FILE_NAME, read_interface, record_interface
from apex_jax.types import ActionSpec, Interface, SegmentSpec

PIXELS = SegmentSpec((84, 84), "uint8", 4, 40, 3, ActionSpec.discrete(6))
VECTORS = SegmentSpec((24,), "float32", 1, 64, 5, ActionSpec.continuous(2))


@pytest.mark.parametrize("interface", [
    Interface(PIXELS, None, None, None),
    Interface(VECTORS, {"velocity": (9,), "height": (), "arms": (3, 2)}, (-2.0, 0.1), (2.0, 1e6)),
])  # fmt: skip
def test_interface_is_read_as_it_was_written(interface: Interface, tmp_path: Path) -> None:
    record_interface(tmp_path, interface)
    found = read_interface(tmp_path)
    assert found == interface
    assert list(found.parts or {}) == list(interface.parts or {}), "the order of the parts counts"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spec": 1, "parts": null}', "\xff", '{"spec": {}, "parts": {}}'])
def test_cut_or_foreign_file_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(RunError, match=r"interface.json cannot be read: .*; start the run again") as error:
        read_interface(tmp_path)
    assert "\n" not in str(error.value)
