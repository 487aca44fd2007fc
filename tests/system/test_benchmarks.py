"""The benchmarks are documented, and their report ends in one JSON object."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from apex_jax.config.load import load
from benchmarks import package_wrappers, packages, page, report
from tests.rigs.processes import ROOT

FOLDER = ROOT / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "def main()" in path.read_text())


def test_page_names_every_benchmark_and_has_what_is_kept_of_it() -> None:
    assert sorted(set(re.findall(r"python -m benchmarks\.(\w+)", page.PAGE.read_text()))) == NAMES
    assert page.with_table(page.PAGE.read_text()) == page.PAGE.read_text(), "run: python -m benchmarks.page"


def test_what_a_benchmark_measures_is_kept_with_command_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    last = json.dumps({"benchmark": "x/a b", "figures": {"f": 1.0}})
    (tmp_path / "benchmarks" / "x.py").write_text(f"print('progress')\nprint({last!r})\n")
    monkeypatch.setattr(page, "FOLDER", tmp_path / "benchmarks")
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(page, "of_git", lambda *_: "abc")  # also for changed code
    page.keep(["x", "--seconds", "2"])
    [path] = (tmp_path / "results").iterdir()
    record = json.loads(path.read_text())
    assert path.name == "x_a_b.json"
    assert record == json.loads(last) | {"command": "python -m benchmarks.x --seconds 2", "commit": "abc+"}


def test_table_shows_bounds_and_what_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"batches/s": report.target(6_687.0, at_least=3_000), "s": report.target(12.5, at_most=10)}
    record = {"command": "python -m benchmarks.x", "commit": "abc", "date": "2026-11-28", "targets": targets}
    monkeypatch.setattr(page, "records", lambda: [record])
    assert page.table().splitlines()[2:] == [
        "| `python -m benchmarks.x` | batches/s | **6,687** | at least 3,000 | abc, 2026-11-28 |",
        "|  | s | 12.5 (missed) | at most 10 |  |",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_can_be_imported_and_is_documented(name: str) -> None:
    assert len(importlib.import_module(f"benchmarks.{name}").__doc__ or "") > 80


@pytest.mark.long
def test_last_line_is_a_json_object_or_names_the_missing_package() -> None:
    command = [sys.executable, "-m", "benchmarks.sampling", "indices", "--seconds", "0.001"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    if importlib.util.find_spec("cpprb") is None:
        assert done.returncode == 1
        assert done.stderr.startswith("cpprb is not installed: ")
        return
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["benchmark"] == "sampling indices"
    assert {"figures", "targets", "date", "machine", "versions"} <= last.keys()
    assert last["targets"]["speedup, 512 of 2^20"].keys() == {"measured", "at_least", "met"}
    assert last["versions"]["numpy"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_benchmark_of_a_gpu_runs_in_small_on_a_cpu() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--configs", "humanoid", "--processes", "1"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880, env=environment)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert figures["update"]["humanoid"]["bfloat16"]["updates/s"] > 0
    assert figures["frame store"]["GB of a million transitions"] == pytest.approx(8.08, abs=0.01)
    assert figures["whole"]["1 actor processes"]["updates/s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fault_38_a_minute_of_chaos_violates_no_invariant() -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--minutes", "1", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert sum(figures["faults"].values()) >= 2
    assert figures["violations"] == []


def test_packages_are_described_and_what_runs_in_their_interpreters_is_of_python_3_8() -> None:
    rows = yaml.safe_load((FOLDER / "packages.yaml").read_text())
    assert len({row["package"] for row in rows}) == len(rows) >= 40
    for row in rows:
        optional = {"settings", "variables", "options", "distribution", "python"}
        assert row.keys() - optional == {"package", "task", "install"}
        assert ("python" in row) != row["task"].startswith("jax:")
        load(None, [f"environment.task={row['task']}", *row.get("options", [])])
        module, _, name = row["task"].removeprefix("gymnasium:").rpartition(":")
        assert module != package_wrappers.__name__ or callable(getattr(package_wrappers, name))
    for name in ("package_rollout.py", "package_wrappers.py"):
        ast.parse((FOLDER / name).read_text(), feature_version=(3, 8))


def test_table_of_packages_is_what_was_kept() -> None:
    text = packages.PAGE.read_text()
    assert packages.with_table(text) == text, "run: python -m benchmarks.packages --table"
