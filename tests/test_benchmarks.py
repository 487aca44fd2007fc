"""The benchmarks say what they measure, and the report ends in one JSON object."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys

import pytest

from benchmarks import report
from tests.processes import ROOT

FOLDER = ROOT / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "def main()" in path.read_text())


def test_every_benchmark_has_a_row_and_every_row_a_benchmark() -> None:
    rows = [line.split("`")[1] for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert sorted(rows) == [f"python -m benchmarks.{name}" for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_can_be_imported_and_says_what_it_compares(name: str) -> None:
    assert len(importlib.import_module(f"benchmarks.{name}").__doc__ or "") > 80


def test_the_last_line_is_one_json_object_with_figures_targets_machine_and_versions_or_says_what_is_missing() -> None:
    command = [sys.executable, "-m", "benchmarks.sum_tree", "--seconds", "0.001"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    if importlib.util.find_spec("cpprb") is None:
        assert done.returncode == 1
        assert done.stderr.startswith("cpprb is not installed: ")
        return
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["benchmark"] == "sum_tree"
    assert {"figures", "targets", "date", "machine", "versions"} <= last.keys()
    assert last["targets"]["speedup, 512 of 2^20"].keys() == {"measured", "at_least", "met"}
    assert last["versions"]["numpy"]


@pytest.mark.parametrize(("measured", "met"), [(1.0, False), (2.0, True), (3.0, True), (4.0, False)])
def test_a_target_tells_whether_it_is_met(measured: float, met: bool) -> None:
    assert report.target(measured, at_least=2.0, at_most=3.0) == {
        "measured": measured,
        "at_least": 2.0,
        "at_most": 3.0,
        "met": met,
    }
