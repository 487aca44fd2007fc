"""Every numbered fault has a test of its name, and docs/faults.md says where."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBERS = range(1, 41)


def rows() -> dict[int, list[str]]:
    """Returns the files that docs/faults.md names for each number."""
    table = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    return {int(number): re.findall(r"`([^`]+)`", files) for number, files in table}


def found_tests() -> dict[int, set[str]]:
    """Returns the files that have tests of each number."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_fault_(\d\d)_\w", node.name)):
                found[int(match[1])].add(str(path.relative_to(ROOT)))
    return found


def test_every_fault_has_a_row() -> None:
    assert list(rows()) == list(NUMBERS)


def test_every_fault_has_tests_in_the_files_of_its_row_and_every_fault_test_a_row() -> None:
    assert found_tests() == {number: set(files) for number, files in rows().items()}
