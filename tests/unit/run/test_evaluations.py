"""Specification of the chosen evaluation: of exactly these params, with most games, of equals the newest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apex_jax.run.evaluations import FILE_NAME, best_evaluation, return_text


def line(time: float, updates: int, returns: list[Any], **more: Any) -> dict[str, Any]:
    return {"time": time, "updates": updates, "frames": 0, "exploration": 0.1, "seed": 1, "returns": returns, **more}


def write(directory: Path, *lines: dict[str, Any]) -> None:
    (directory / FILE_NAME).write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_the_chosen_evaluation_has_the_given_updates_and_the_most_games(tmp_path: Path) -> None:
    write(tmp_path, line(1, 5, [1.0] * 9), line(2, 7, [2.0, 3.0]), line(3, 7, [4.0]), line(4, 8, [5.0] * 9))
    found = best_evaluation(tmp_path, 7)
    assert found is not None
    assert (found.time, found.updates, found.exploration, found.returns.tolist()) == (2, 7, 0.1, [2.0, 3.0])


def test_of_equal_evaluations_the_newest_is_chosen(tmp_path: Path) -> None:
    write(tmp_path, line(2, 7, [2.0]), line(3, 7, [4.0]), line(1, 7, [5.0]))
    found = best_evaluation(tmp_path, 7)
    assert found is not None
    assert found.returns.tolist() == [4.0]


def test_evaluations_of_the_folder_of_the_best_params_count(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    write(tmp_path, line(1, 7, [2.0]))
    write(tmp_path / "best", line(2, 7, [3.0, 4.0]))
    found = best_evaluation(tmp_path, 7)
    assert found is not None
    assert found.returns.tolist() == [3.0, 4.0]


def test_without_an_evaluation_of_these_params_there_is_none(tmp_path: Path) -> None:
    assert best_evaluation(tmp_path, 7) is None
    write(tmp_path, line(1, 6, [1.0]), line(2, 8, [1.0]))
    assert best_evaluation(tmp_path, 7) is None


def test_invalid_lines_of_evaluations_are_skipped(tmp_path: Path) -> None:
    foreign = [line(1, 7, []), line(1, 7, ["x"]), line(1, 7, [None]), {"time": 1}, line(1, 7, [1.0], exploration=None)]
    write(tmp_path, *foreign, line(1, 7, [3.0]))
    with open(tmp_path / FILE_NAME, "a") as file:
        file.write('{"time": 5, "updates": 7, "returns": [9.0')
    found = best_evaluation(tmp_path, 7)
    assert found is not None
    assert found.returns.tolist() == [3.0]


@pytest.mark.parametrize(("value", "text"), [
    (0.955, "0.955"), (0.9996, "0.9996"), (1.0, "1.0"), (0.0, "0.0"), (-0.0, "0.0"), (1e-9, "0.0"), (-2 / 3, "-0.6667"),
    (14.6, "14.6"), (16.666, "16.67"), (487.25, "487.2"), (1000.0, "1000.0"), (-29_981.25, "-29981.2"),
])  # fmt: skip
def test_returns_are_printed_with_four_digits_or_one_decimal(value: float, text: str) -> None:
    assert return_text(value) == text
    assert return_text(value, ",") == (f"{text[:-5]},{text[-5:]}" if abs(value) >= 1000 else text)
