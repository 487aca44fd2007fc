"""Specification of params in a file: bit-exact, under the names of their paths; another file is one clear error."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from apex_jax.config import Config, EnvironmentConfig
from apex_jax.config.load import load
from apex_jax.host.errors import RunError
from apex_jax.run.environment_spec import of_record
from apex_jax.run.evaluations import Evaluation, is_best
from apex_jax.run.params_file import keep_if_best, load_params, read_metadata, save_params
from apex_jax.types import ActionSpec, EnvironmentSpec, SegmentSpec
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


# The best evaluation ----------------------------------------------------------------------------------------------

INTERFACE = EnvironmentSpec(SegmentSpec((4,), "float32", 1, 32, 3, ActionSpec.discrete(2)), None, None, None)


def keep(run: Path, mean_return: float, updates: int = 7) -> bool:
    config = Config(run_directory=str(run), environment=EnvironmentConfig(task="CartPole-v1"))
    evaluation = Evaluation(1e9, updates, 0.1, np.full(10, mean_return), environment_steps=40)
    return keep_if_best(config, INTERFACE, evaluation, {"x": np.full(3, mean_return, np.float32)}, "dqn")


def kept(run: Path) -> tuple[int, float]:
    """Returns the updates of the kept params, and one of these."""
    path = run / "best" / "model.safetensors"
    return int(read_metadata(path)["updates"]), float(load_params(path, {"x": np.zeros(3, np.float32)})["x"][0])


@pytest.mark.parametrize("returns", [[-5.0], [3.0, 9.0, 9.0, 4.0, 9.5, 9.0], [2.0, -1.0], [-1e6, -0.0, 0.0]])
def test_the_first_evaluation_of_the_highest_return_is_kept(tmp_path: Path, returns: list[float]) -> None:
    for number, value in enumerate(returns):
        is_better = value > max(returns[:number], default=-math.inf)
        assert keep(tmp_path, value, updates=number) == is_better
    assert kept(tmp_path) == (returns.index(max(returns)), max(returns))
    metadata = read_metadata(tmp_path / "best" / "model.safetensors")
    assert float(metadata["mean_return"]) == max(returns)
    assert of_record(json.loads(metadata["interface"])) == INTERFACE
    assert load(tmp_path / "best" / "config.yaml").environment.task == "CartPole-v1"
    assert is_best(tmp_path / "best")
    assert not is_best(tmp_path), "a run directory is none"
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["config.yaml", "model.safetensors"]


class _KilledError(BaseException):
    pass


@pytest.mark.parametrize("module", ["params_file", "provenance"])
def test_a_kill_during_a_write_leaves_the_previous_best_params_and_the_next_are_written(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, 1.0)

    def die(path: Path, content: str | bytes) -> None:
        path.with_name(f".{path.stem}.half{path.suffix}").write_bytes(b"par")
        raise _KilledError

    with monkeypatch.context() as patched:
        patched.setattr(f"apex_jax.run.{module}.write_durably", die)
        with pytest.raises(_KilledError):
            keep(tmp_path, 2.0)
    assert kept(tmp_path)[1] == 1.0
    assert keep(tmp_path, 1.5)
    assert kept(tmp_path)[1] == 1.5


def test_damaged_best_params_are_replaced_by_the_next_and_a_disk_error_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path, 1.0)
    path = tmp_path / "best" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match="cannot be read"):
        kept(tmp_path)
    assert keep(tmp_path, 0.5)
    assert kept(tmp_path)[1] == 0.5
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "best").touch()  # in the way
    assert not keep(tmp_path / "other", 1.0)
    assert "the params of the best evaluation are not kept in" in caplog.text
