"""The command status prints a table: what each process does, how fast, how far it is, and what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_jax.host.errors import UsageError
from apex_jax.operations import status_command
from apex_jax.operations.status_summary import MAX_LINES, ProcessStatus, with_roles
from tests.rigs.links import free_address
from tests.rigs.statuses import Served, served

__all__ = ["served"]


def status_of(report: dict[str, Any]) -> ProcessStatus:
    return ProcessStatus("learner", "tcp://a:1", report, "")


@pytest.mark.parametrize("address", ["127.0.0.1:80", "tcp://127.0.0.1", "udp://x:1", "", "ipc://", "nonsense"])
def test_invalid_address_is_wrong_usage(address: str) -> None:
    with pytest.raises(UsageError, match=r"tcp://HOST:PORT or ipc://PATH"):
        status_command.run([address])


# A process ---------------------------------------------------------------------------------------------------------

LEARNER: dict[str, Any] = {
    "role": "learner",
    "healthy": True,
    "updates": 12_345,
    "environment_frames": 1_234_567,
    "weights_version": 1_234,
    "checkpoint": {"updates": 12_000, "age_seconds": 61.5},
    "peers": {"replay": "joined", "weights_clients": 2},
    "metrics": {
        "charts/updates_per_second": 277.125,
        "learner/wait_seconds_share": 0.03,
        "replay/dropped_stale_priority": 9,
    },
}


def test_row_of_a_learner_has_its_work_its_speed_its_progress_and_the_ages_of_what_it_saved() -> None:
    report = LEARNER | counted(updates=0.2) | {"metrics": LEARNER["metrics"] | {"storage/copy_age_seconds": 90.0}}
    progress = "12,345 updates (0 s ago), copy 90 s old, checkpoint 62 s old"
    assert status_of(report).cells == ("learns", "277.1 updates/s", progress)


@pytest.mark.parametrize(("report", "work"), [
    (LEARNER | {"metrics": {}}, "waits for batches, or compiles"),
    (LEARNER | {"metrics": {}, "peers": {"replay": "connecting"}}, "waits for replay (connecting)"),
    ({"role": "actor", "metrics": {"actor/steps_per_second": 9.0}, "peers": {"learner": "lost"}}, "acts"),
    ({"role": "replay", "metrics": {"replay/inserts_per_second": 0.0}}, "waits for segments"),
    ({"role": "evaluator", "phase": "playing", "weights_version": 3}, "playing"),
    ({"role": "evaluator", "phase": "playing", "weights_version": None}, "waits for weights"),
])  # fmt: skip
def test_row_names_the_work_of_each_role(report: dict[str, Any], work: str) -> None:
    assert status_of(report).cells[0] == work


def test_every_problem_is_listed_up_to_the_limit() -> None:
    report = LEARNER | {
        "healthy": False,
        "progress_age_seconds": 75.0,
        "peers": {"replay": "lost"},
        "unreadable_keys": {"actor": "Permission denied"},
        "errors": ["runs/x/checkpoints/9 was not saved"],
        "metrics": {"learner/failed_checkpoints": 2, "replay/dropped_bad_checksum": 1_000},
    }
    assert status_of(report).problems == [
        "no progress for 75 s",
        "is not connected to replay (lost)",
        "keys of actor cannot be read: Permission denied",
        "runs/x/checkpoints/9 was not saved",
    ]
    assert len(status_of({"errors": ["full disk"] * (MAX_LINES + 3)}).problems) == MAX_LINES


def counted(**ages: float | None) -> dict[str, Any]:
    """Returns the report of a process whose counts grew so many seconds ago; None: never, since 90 s."""
    counts = {
        name: {"count": 12_345, "age_seconds": 90.0 if age is None else age, "has_changed": age is not None}
        for name, age in ages.items()
    }
    return {"role": "learner", "name": "learner", "healthy": True, "progress": counts}


@pytest.mark.parametrize(("report", "problem"), [
    (counted(updates=59.0, segments=0.0), ""),
    (counted(updates=75.0, segments=0.0), "no updates for 75 s"),
    (counted(updates=None, segments=75.0), "no segments for 75 s"),  # it waits for a replay that no longer fills
    (counted(updates=None, segments=1.0), ""),  # the replay fills
    (counted(updates=None, segments=None), ""),  # it starts
    (counted(evaluations=5000.0), ""),  # games are long
    ({"role": "replay", "peers": {"learner": None, "actors": [{}]}}, "has no learner"),
])  # fmt: skip
def test_counts_that_no_longer_grow_are_a_problem(report: dict[str, Any], problem: str) -> None:
    assert status_of(report).problems == ([problem] if problem else [])


# A fleet ----------------------------------------------------------------------------------------------------------


def test_table_of_a_fleet_names_each_process_and_what_is_wrong(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.content |= LEARNER | counted(updates=0.2) | {"warnings": ["the learner waits for batches"]}
    file, gone = tmp_path / "fleet", free_address()
    file.write_text(f"# those of today\n{served.address}\n\nevaluator={gone}  # on another host\n")
    assert status_command.run(["--fleet", str(file)]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["process", "does", "speed", "progress", "address"]
    assert (lines[1][:2], lines[1][-1]) == (["learner", "learns"], served.address)
    assert "12,345 updates (0 s ago)" in " ".join(lines[1])
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
    lost = {"role": "actor", "peers": {"replay": "lost"}, "metrics": {"actor/steps_per_second": 0.0}}
    states = {"learner": "running", "actor-0": "restarted 1x"}
    served.content = {
        "role": "local",
        "name": "local",
        "roles": states,
        "reports": {"learner": LEARNER, "actor-0": lost},
    }
    assert status_command.run([served.address]) == 1
    lines = [line.removesuffix(served.address).split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["local", "actor-0", "restarted", "1x"]
    assert lines[2][:4] == ["local/learner", "learns", "277.1", "updates/s"]
    assert lines[3] == ["local/actor-0", "waits", "for", "replay", "(lost)", "0.0", "steps/s"]
    assert lines[5:] == [["problems"], ["local/actor-0", "is", "not", "connected", "to", "replay", "(lost)"]]
    assert status_command.run([served.address, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {served.address: served.content}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ("role", "phase", "healthy", "progress_age_seconds", "peers", "metrics", "checkpoint", "reports", "roles")
MORE_FIELDS = ("steps_per_second", "progress", "errors", "warnings", "weights_age_seconds", "weights_version")
REPORTS = st.fixed_dictionaries({}, optional=dict.fromkeys((*FIELDS, *MORE_FIELDS), JSON))


@settings(max_examples=20, deadline=None)
@given(report=REPORTS)
def test_any_report_is_a_table_of_printable_lines(report: dict[str, Any]) -> None:
    lines = status_command.table(with_roles(status_of(report)))
    assert all(line.isprintable() for line in lines)
