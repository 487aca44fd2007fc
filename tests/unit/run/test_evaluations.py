"""Specification of the best params: they are those of the highest return, whatever happens while they are written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.config import Config, EnvironmentConfig
from apex_jax.config.load import load
from apex_jax.host import disk
from apex_jax.run.checkpoint_files import CheckpointError
from apex_jax.run.environment_spec import read_environment_spec
from apex_jax.run.evaluations import FILE_NAME as EVALUATIONS
from apex_jax.run.evaluations import (
    FOLDER,
    RECORD_NAME,
    Evaluation,
    best_evaluation,
    is_best,
    keep_if_best,
    read_best,
    read_evaluations,
    return_text,
)
from apex_jax.types import ActionSpec, EnvironmentSpec, SegmentSpec

INTERFACE = EnvironmentSpec(SegmentSpec((4,), "float32", 1, 32, 3, ActionSpec.discrete(2)), None, None, None)


def keep(run: Path, mean_return: float, params: bytes = b"params", updates: int = 7) -> bool:
    config = Config(run_directory=str(run), environment=EnvironmentConfig(task="CartPole-v1"))
    evaluation = Evaluation(1e9, updates, 0.1, np.full(10, mean_return), environment_steps=40, frames=160)
    return keep_if_best(config, INTERFACE, evaluation, "architecture", params)


def kept(run: Path) -> tuple[float, bytes]:
    params = read_best(run / FOLDER, "architecture")[2]
    return json.loads((run / FOLDER / RECORD_NAME).read_text())["mean_return"], params


@pytest.mark.parametrize("returns", [[-5.0], [3.0, 9.0, 9.0, 4.0, 9.5, 9.0], [2.0, -1.0], [-1e6, -0.0, 0.0]])
def test_the_first_evaluation_of_the_highest_return_is_kept(tmp_path: Path, returns: list[float]) -> None:
    run = tmp_path
    for number, value in enumerate(returns):
        is_better = value > max(returns[:number], default=-math.inf)
        assert keep(run, value, b"%d" % number, updates=number) == is_better
    highest = returns.index(max(returns))
    assert read_best(run / FOLDER, "architecture") == (highest, 40, b"%d" % highest)
    assert kept(run)[0] == returns[highest]
    assert len(list((run / FOLDER).glob("params-*"))) == 1


def test_best_params_are_stored_with_a_readable_record(tmp_path: Path) -> None:
    assert not is_best(tmp_path / FOLDER)
    assert keep(tmp_path, 12.5)
    assert is_best(tmp_path / FOLDER)
    assert not is_best(tmp_path), "a run directory is none"
    record = json.loads((tmp_path / FOLDER / RECORD_NAME).read_text())
    assert {name: record[name] for name in ("mean_return", "episodes", "updates", "environment_steps", "frames")} == {
        "mean_return": 12.5, "episodes": 10, "updates": 7, "environment_steps": 40, "frames": 160,
    }  # fmt: skip
    assert read_environment_spec(tmp_path / FOLDER) == INTERFACE
    assert load(tmp_path / FOLDER / "config.yaml").environment.task == "CartPole-v1"


class _KilledError(BaseException):
    pass


@pytest.mark.parametrize("writes", range(4))
def test_a_kill_during_a_write_leaves_the_previous_best_params_and_the_next_are_written(
    tmp_path: Path, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, 1.0, b"before")
    left = iter([True] * writes + [False])
    write = disk.write_durably

    def write_or_die(path: Path, content: str | bytes) -> None:
        if not next(left):
            path.with_name(f".{path.stem}.half{path.suffix}").write_bytes(b"par")
            raise _KilledError
        write(path, content)

    with monkeypatch.context() as patched:
        for module in ("evaluations", "environment_spec", "provenance"):
            patched.setattr(f"apex_jax.run.{module}.write_durably", write_or_die)
        with pytest.raises(_KilledError):
            keep(tmp_path, 2.0, b"killed")
    assert kept(tmp_path) == (1.0, b"before")
    assert keep(tmp_path, 1.5, b"after")
    assert kept(tmp_path) == (1.5, b"after")
    assert len(list((tmp_path / FOLDER).glob("params-*"))) == 1


@pytest.mark.parametrize("damage", [
    "flipped", "shorter", "no params", "no evaluation", "half a record", "[]", {"format": 2}, {"params": 3},
    {"params": "../x"},
], ids=str)  # fmt: skip
def test_damaged_best_params_are_one_line_of_error_with_an_alternative(tmp_path: Path, damage: Any) -> None:
    keep(tmp_path, 1.0, b"params")
    folder = tmp_path / FOLDER
    (params,) = folder.glob("params-*")
    record = (folder / RECORD_NAME).read_text()
    (tmp_path / "x").write_bytes(b"params")  # no file of the folder
    if isinstance(damage, dict):
        (folder / RECORD_NAME).write_text(json.dumps(json.loads(record) | damage))
    elif damage in ("flipped", "shorter"):
        params.write_bytes(b"parAms" if damage == "flipped" else b"param")
    elif damage.startswith("no "):
        (params if damage == "no params" else folder / RECORD_NAME).unlink()
    else:
        (folder / RECORD_NAME).write_text(record[: len(record) // 2] if damage == "half a record" else damage)
    assert is_best(folder)
    with pytest.raises(CheckpointError) as error:
        kept(tmp_path)
    assert str(error.value).startswith(f"{folder} is damaged: ")
    assert str(error.value).endswith(f"checkpoint={tmp_path}")
    assert "\n" not in str(error.value)
    if damage != "flipped":  # which is found only by reading all params
        assert keep(tmp_path, 0.5, b"next")
        assert kept(tmp_path) == (0.5, b"next")


def test_params_of_another_network_are_refused(tmp_path: Path) -> None:
    keep(tmp_path, 1.0)
    with pytest.raises(CheckpointError, match="has a different network: architecture, not wider"):
        read_best(tmp_path / FOLDER, "wider")


def test_a_disk_error_is_logged_and_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).touch()  # in the way
    assert not keep(tmp_path, 1.0)
    assert "the params of the best evaluation are not kept in" in caplog.text


def line(time: float, updates: int, returns: list[Any], **more: Any) -> dict[str, Any]:
    return {"time": time, "updates": updates, "frames": 0, "exploration": 0.1, "seed": 1, "returns": returns, **more}


def write(directory: Path, *lines: dict[str, Any]) -> None:
    (directory / EVALUATIONS).write_text("".join(json.dumps(each) + "\n" for each in lines))


@pytest.mark.parametrize(("lines", "lines_of_best", "returns"), [
    ([line(1, 5, [1.0] * 9), line(2, 7, [2.0, 3.0]), line(3, 7, [4.0]), line(4, 8, [5.0] * 9)], [], [2.0, 3.0]),
    ([line(2, 7, [2.0]), line(3, 7, [4.0]), line(1, 7, [5.0])], [], [4.0]),
    ([line(1, 7, [2.0])], [line(2, 7, [3.0, 4.0])], [3.0, 4.0]),
    ([line(1, 6, [1.0]), line(2, 8, [1.0])], [], None),
    ([], [], None),
], ids=["the most games", "the newest of equals", "in the folder best", "of other updates", "no file"])  # fmt: skip
def test_evaluation_of_some_updates_is_found(
    lines: list[Any], lines_of_best: list[Any], returns: list[float] | None, tmp_path: Path
) -> None:
    (tmp_path / "best").mkdir()
    for folder, of_folder in ((tmp_path, lines), (tmp_path / "best", lines_of_best)):
        if of_folder:
            write(folder, *of_folder)
    found = best_evaluation(tmp_path, 7)
    assert (found and found.returns.tolist()) == returns


def test_evaluation_is_read_as_it_was_stored(tmp_path: Path) -> None:
    info = {"level": np.array([1.5, np.nan])}
    stored = Evaluation(1e9, 7, 0.25, np.array([3.5, -1.0]), info, 40, 160, 2.5, 0.75)
    stored.store(str(tmp_path), seed=3)
    [found] = read_evaluations(tmp_path)
    assert found._replace(returns=stored.returns, info=info) == stored
    np.testing.assert_array_equal(found.returns, stored.returns)
    np.testing.assert_array_equal(found.info["level"], info["level"])


def test_invalid_lines_of_evaluations_are_skipped(tmp_path: Path) -> None:
    foreign = [line(1, 7, []), line(1, 7, ["x"]), line(1, 7, [None]), {"time": 1}, line(1, 7, [1.0], exploration=None)]
    write(tmp_path, *foreign, line(2, 7, [3.0], info={"level": [None], "bad": ["x"], "short": [], "no": 3}))
    with open(tmp_path / EVALUATIONS, "a") as file:
        file.write('{"time": 5, "updates": 7, "returns": [9.0')
    found = best_evaluation(tmp_path, 7)
    assert found is not None
    assert (found.time, found.updates, found.exploration, found.returns.tolist()) == (2, 7, 0.1, [3.0])
    assert list(found.info) == ["level"]


@pytest.mark.parametrize(("value", "text"), [
    (0.9996, "0.9996"), (1.0, "1.0"), (-0.0, "0.0"), (1e-9, "0.0"), (-2 / 3, "-0.6667"), (16.666, "16.67"),
    (487.25, "487.2"), (-29_981.25, "-29981.2"),
])  # fmt: skip
def test_returns_are_printed_with_four_digits_or_one_decimal(value: float, text: str) -> None:
    assert return_text(value) == text
    assert return_text(value, ",") == (f"{text[:-5]},{text[-5:]}" if abs(value) >= 1000 else text)
