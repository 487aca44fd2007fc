"""The evaluations of a run are read as they were stored; the newest with most games is that of a policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.run.evaluations import FILE_NAME as EVALUATIONS
from apex_jax.run.evaluations import Evaluation, best_evaluation, read_evaluations


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
