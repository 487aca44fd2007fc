"""Specification of params in a file: bit-exact, under the names of their paths; another file is one clear error."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from apex_jax.host.errors import RunError
from apex_jax.run.params_file import load_params, read_metadata, save_params
from tests.rigs.agents import assert_equal_bits

ODD = np.array([0.0, -0.0, 1e-45, np.inf, -np.inf, np.nan, 3.4e38, -1 / 3], np.float32)
PARAMS: dict[str, Any] = {
    "policy": {"kernel": ODD.reshape(2, 4).T, "bias": ODD[:0]},
    "critics": ({"q": ODD[3]}, {"q": ODD}),
}


def test_params_are_read_bit_for_bit_as_they_were_written_under_the_names_of_their_paths(tmp_path: Path) -> None:
    save_params(tmp_path / "p", PARAMS, {"a": "b", "c": "\u00fc\n"})
    assert_equal_bits(load_params(tmp_path / "p", PARAMS), PARAMS)
    assert set(load_file(tmp_path / "p")) == {"policy.kernel", "policy.bias", "critics.0.q", "critics.1.q"}
    assert read_metadata(tmp_path / "p").items() >= {"a": "b", "c": "\u00fc\n"}.items()


@pytest.mark.parametrize("change", ["cut", "empty", "text", "header", "foreign dtype", "flipped"])
def test_a_damaged_file_is_one_line_of_error(change: str, tmp_path: Path) -> None:
    path = tmp_path / "p"
    save_params(path, PARAMS, {"a": "b"})
    content = path.read_bytes()
    header = content.replace(b'"F32"', b'"F99"')
    foreign = b'{"a":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}'
    contents = {"cut": content[:-1], "empty": b"", "text": b"<html>" * 9, "header": header}
    contents["foreign dtype"] = struct.pack("<Q", len(foreign)) + foreign + b"0"
    contents["flipped"] = content[:-1] + bytes([content[-1] ^ 1])
    path.write_bytes(contents[change])
    with pytest.raises(RunError, match=r"p( cannot be read: |: its parameters are not as).*; copy it again") as error:
        load_params(path, PARAMS)
    assert "\n" not in str(error.value)


def test_a_missing_file_or_a_folder_is_one_line_of_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(RunError, match="cannot be read"):
            read_metadata(path)


@pytest.mark.parametrize(("name", "array", "message"), [
    ("critics.1.q", None, r"critics.1.q is missing, where this network has float32\[8\]"),
    ("critics.1.q", ODD[1:], r"critics.1.q is float32\[7\], where this network has float32\[8\]"),
    ("critics.1.q", ODD.astype(np.float64), r"critics.1.q is float64\[8\], where"),
    ("other", ODD, r"other is float32\[8\], where this network has missing"),
])  # fmt: skip
def test_arrays_of_another_network_are_one_line_of_error(
    name: str, array: np.ndarray | None, message: str, tmp_path: Path
) -> None:
    save_params(tmp_path / "p", PARAMS, {})
    arrays = load_file(tmp_path / "p") | ({} if array is None else {name: array})
    if array is None:
        del arrays[name]
    save_file(arrays, tmp_path / "p")
    with pytest.raises(RunError, match=message):
        load_params(tmp_path / "p", PARAMS)
