"""Specification of `interface.json`: it is read as it was written, and nothing else is accepted."""

from __future__ import annotations

import json
from pathlib import Path

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
IMAGE = ImageSpec((84, 84), "uint8", "HW", 0.0, 255.0, ("eyes", 1))
VECTORS = SegmentSpec((24,), "float32", 1, 64, 5, ActionSpec.continuous(2))


@pytest.mark.parametrize("environment_spec", [
    EnvironmentSpec(PIXELS, None, None, None),
    EnvironmentSpec(PIXELS, None, None, None, (ImageSpec((84, 84), "float32", "HW", 0.0, 1.0),), first_action=-3),
    EnvironmentSpec(PIXELS._replace(numbers=2), (Part(("at", 0), (2,)),), None, None, (IMAGE, IMAGE)),
    EnvironmentSpec(MASKED, None, None, None, (), "int64", action_part=Part((), (2,), (2, 3), (0, -1))),
    EnvironmentSpec(VECTORS, (Part(("velocity",), (9, 2)), Part(("arms", 1), (3, 2))), (-2.0, 0.1), (2.0, 1e6)),
    EnvironmentSpec(VECTORS, (Part((), (2,), (3, 21), (0, -1)),), (-2.0, 0.1), (2.0, 1e6), (), "float64"),
])  # fmt: skip
def test_interface_is_read_as_it_was_written(environment_spec: EnvironmentSpec, tmp_path: Path) -> None:
    record_environment_spec(tmp_path, environment_spec)
    assert read_environment_spec(tmp_path) == environment_spec


def test_interface_of_an_earlier_release_is_read_with_its_image_and_with_its_mask_as_a_part_of_its_own() -> None:
    image = ImageSpec((84, 84), "float32", "HW", 0.0, 1.0)
    number, mask = (
        {"path": [name], "shape": [size], "counts": [], "starts": []} for name, size in (("x", 3), ("m", 6))
    )
    for now, parts, older in (
        (EnvironmentSpec(PIXELS, None, None, None, (image,)), None, {"image": image._asdict() | {"path": None}}),
        (EnvironmentSpec(MASKED._replace(frame_shape=(3,)), (Part(("x",), (3,)),), None, None), [number, mask], {}),
    ):
        record = as_record(now) | {"parts": parts, "image": None} | older
        del record["images"], record["spec"]["numbers"]
        if record["image"]:
            del record["image"]["path"]
        if parts:
            record["spec"]["frame_shape"] = [9]
        assert of_record(json.loads(json.dumps(record))) == now


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spec": 1, "parts": null}', "\xff", '{"spec": {}, "parts": {}}'])
def test_cut_or_foreign_file_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(RunError, match=r"interface.json cannot be read: .*; start the run again") as error:
        read_environment_spec(tmp_path)
    assert "\n" not in str(error.value)
