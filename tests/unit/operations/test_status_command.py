"""The command status prints a table: what each process does, how fast, how far it is, and what is wrong."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_jax.host.errors import UsageError
from apex_jax.operations import status_command
from apex_jax.operations.pages import FleetPage
from apex_jax.operations.records import MAX_LINES, ProcessStatus, report_path
from tests.rigs.links import free_address
from tests.rigs.statuses import Served, served

__all__ = ["served"]


# A process ---------------------------------------------------------------------------------------------------------

LEARNER: dict[str, Any] = {
    "role": "learner",
    "name": "learner",
    "records": [["does", "learns", "", ""], ["speed", "277.1", "updates/s", ""], ["updates", "12,345", "", "0 s ago"]],
    "problems": [],
    "warnings": [],
}


# A fleet ----------------------------------------------------------------------------------------------------------


def test_table_of_a_fleet_names_each_process_and_what_is_wrong(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.content = LEARNER | {"warnings": ["the learner waits for batches"]}
    file, gone = tmp_path / "fleet", free_address()
    file.write_text(f"# those of today\n{served.address}\n\nevaluator={gone}  # on another host\n")
    assert status_command.run(["--fleet", str(file)]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["process", "does", "speed", "progress", "address"]
    assert (lines[1][:2], lines[1][-1]) == (["learner", "learns"], served.address)
    assert "updates 12,345, 0 s ago" in " ".join(lines[1])
    assert lines[2] == ["evaluator", "unreachable", gone]
    assert lines[4:6] == [["problems"], ["evaluator", *lines[5][1:]]]
    assert "does not answer: Connection refused" in " ".join(lines[5])
    assert lines[7:] == [["warnings"], ["learner", "the", "learner", "waits", "for", "batches"]]
    assert status_command.run([served.address, f"evaluator={gone}", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {served.address: served.content, gone: None}
    assert status_command.run([served.address]) == 0


def test_fleet_that_names_no_process_is_wrong_usage(tmp_path: Path) -> None:
    for arguments in ([], ["--fleet", os.devnull], ["--fleet", str(tmp_path / "missing")]):
        with pytest.raises(UsageError, match=r"give an ADDRESS|cannot be read: No such file"):
            status_command.run(arguments)


def test_processes_of_a_supervisor_have_rows_of_their_own(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    lost = {"role": "actor", "records": [["does", "waits for replay", "", ""]], "problems": ["is not connected"]}
    reports = {"learner": LEARNER, "actor-0": lost}
    served.content = {"role": "local", "name": "local", "records": [["does", "works", "", ""]], "reports": reports}
    assert status_command.run([served.address]) == 1
    lines = [line.removesuffix(served.address).split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["local", "works"]
    assert lines[2][:4] == ["local/learner", "learns", "277.1", "updates/s"]
    assert lines[3] == ["local/actor-0", "waits", "for", "replay"]
    assert lines[5:] == [["problems"], ["local/actor-0", "is", "not", "connected"]]
    assert status_command.run([served.address, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {served.address: served.content}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ("role", "name", "records", "problems", "warnings", "metrics", "reports", "environment_frames")
RECORDS = st.lists(st.lists(JSON, min_size=4, max_size=4), max_size=2)
REPORTS = st.fixed_dictionaries({}, optional={name: JSON | RECORDS for name in FIELDS})


@settings(max_examples=40, deadline=None)
@given(report=REPORTS)
def test_any_report_is_a_table_of_printable_lines(report: dict[str, Any]) -> None:
    status = ProcessStatus("learner", "tcp://a:1", report, "")
    assert all(line.isprintable() for line in status_command.table(status.with_roles()))
    assert all(map(math.isfinite, [status.frames, *status.metrics.values()]))
    FleetPage().update(status.with_roles())


def test_problems_are_cut_at_a_limit() -> None:
    status = ProcessStatus("learner", "tcp://a:1", {"problems": ["full disk"] * (MAX_LINES + 3)}, "")
    assert len(status.problems) == MAX_LINES


def test_a_run_directory_shows_its_processes_and_those_that_no_longer_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_command.run([str(tmp_path)]) == 1
    assert "no process runs" in capsys.readouterr().out
    for name in ("learner", "local"):
        path = report_path(tmp_path, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(LEARNER | {"reports": {"twice": {}}}))
    assert status_command.run([str(tmp_path)]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert rows == [["learner", "learns"], ["local", "learns"], []]
    path.write_text("")  # a full disk
    assert status_command.run([str(tmp_path)]) == 1
    assert "local  its report cannot be read" in capsys.readouterr().out
    os.utime(path, (0, 0))
    assert status_command.run([str(tmp_path)]) == 1
    assert "local  has not reported for" in capsys.readouterr().out
