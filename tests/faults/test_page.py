"""Every numbered fault has a test of its name, and docs/faults.md says where."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = range(1, 41)


def rows() -> dict[int, list[str]]:
    """Returns the files that docs/faults.md names for each number."""
    table = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    return {int(number): re.findall(r"`([^`]+)`", files) for number, files in table}


@functools.cache
def found_tests() -> dict[int, dict[str, list[str]]]:
    """Returns the names of the tests of each number, by file."""
    found: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_fault_(\d\d)_\w", node.name)):
                found[int(match[1])][str(path.relative_to(ROOT))].append(node.name)
    return found


def test_every_fault_has_a_row() -> None:
    assert list(rows()) == list(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_fault_has_tests_in_the_files_of_its_row(number: int) -> None:
    found, said = set(found_tests().get(number, {})), set(rows()[number])
    assert found, f"no test_fault_{number:02}_..."
    assert found == said, "docs/faults.md does not name the files that have tests of this number"


def test_every_fault_test_has_a_known_number() -> None:
    assert set(found_tests()) <= set(NUMBERS)
