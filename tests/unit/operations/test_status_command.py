"""The command status prints what a process does, how fast, with which peers and problems, and then every value."""

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
from apex_jax.operations.status_summary import MAX_LINES, summary
from apex_jax.transport.status_link import StatusError
from tests.rigs.links import free_address
from tests.rigs.statuses import Served, served

__all__ = ["served"]


def rest_of(table: list[str]) -> list[list[str]]:
    """Returns the words of the rows that follow the summary."""
    return [line.split() for line in table[table.index("") + 1 :]]


def test_table_contains_no_control_characters_of_a_peer(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.content |= {
        "pid": 7,
        "uptime_seconds": 61.2,
        "progress_age_seconds": 75.0,
        "memory_bytes": 2**21,
        "rates": {"updates_per_second": 12.345},
        "\x1b[2J": "\x1b]0;evil\x07",
    }
    assert status_command.run([served.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "learner (learner, pid 7): healthy, up 0:01:01"
    assert rest_of(lines)[:2] == [["memory_bytes", "2.0", "MiB"], ["rates.updates_per_second", "12.35"]]
    assert all(line.isprintable() for line in lines)
    served.healthy = False
    assert status_command.run([served.address]) == 1
    assert "NOT HEALTHY: no progress for 75.00 s" in capsys.readouterr().out
    assert status_command.run([served.address, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == served.content


def test_missing_answer_is_a_one_line_error() -> None:
    with pytest.raises(StatusError, match=r"^tcp://127\.0\.0\.1:\d+ ") as caught:
        status_command.run([free_address()])
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("address", ["127.0.0.1:80", "tcp://127.0.0.1", "udp://x:1", "", "ipc://", "nonsense"])
def test_invalid_address_is_wrong_usage(address: str) -> None:
    with pytest.raises(UsageError, match=r"tcp://HOST:PORT or ipc://PATH"):
        status_command.run([address])


# The summary ------------------------------------------------------------------------------------------------------

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


def test_summary_of_a_learner_at_work() -> None:
    assert list(summary(LEARNER)) == [
        ("now", "learns"),
        ("speed", "277.12 updates/s, waits 3% of the time"),
        ("progress", "12,345 updates, 1,234,567 environment frames, weights version 1234"),
        ("checkpoint", "at 12,000 updates, 0:01:01 old"),
        ("peers", "replay joined, weights clients 2"),
        ("problems", "none"),
    ]


@pytest.mark.parametrize(("report", "row"), [
    (LEARNER | {"metrics": {}}, ("now", "waits for batches, or compiles")),
    (LEARNER | {"metrics": {}, "peers": {"replay": "connecting"}}, ("now", "waits for replay (connecting)")),
    (LEARNER | {"checkpoint": None}, ("checkpoint", "none yet")),
    ({"role": "actor", "metrics": {"actor/steps_per_second": 9.0}, "peers": {"learner": "lost"}}, ("now", "acts")),
    ({"role": "replay", "metrics": {"replay/inserts_per_second": 0.0}}, ("now", "waits for segments")),
    ({"role": "replay", "peers": {"learner": None, "actors": [{}, {}]}}, ("peers", "no learner, 2 actors")),
    ({"role": "evaluator", "phase": "playing", "weights_version": 3}, ("now", "playing")),
    ({"role": "evaluator", "phase": "playing", "weights_version": None}, ("now", "waits for weights")),
])  # fmt: skip
def test_summary_shows_the_work_and_the_peers_of_each_role(report: dict[str, Any], row: tuple[str, str]) -> None:
    assert row in list(summary(report))


def test_summary_lists_every_problem_up_to_its_limit() -> None:
    report = LEARNER | {
        "healthy": False,
        "progress_age_seconds": 75.0,
        "peers": {"replay": "lost"},
        "unreadable_keys": {"actor": "Permission denied"},
        "errors": ["runs/x/checkpoints/9 was not saved"],
        "metrics": {"learner/failed_checkpoints": 2, "replay/dropped_bad_checksum": 1_000},
    }
    problems = [text for _, text in summary(report)][-4:]
    parts = (
        "75.00 s",
        "replay (lost)",
        "actor cannot be read: Permission denied",
        "runs/x/checkpoints/9 was not saved",
    )
    assert [part for part, problem in zip(parts, problems, strict=True) if part not in problem] == []
    many = {"warnings": [f"advice {number}" for number in range(MAX_LINES + 3)]}
    assert list(summary(many))[-1] == ("", "and 3 more, see below")


def counted(**ages: float | None) -> dict[str, Any]:
    """Returns the report of a process whose counts grew so many seconds ago; None: never, since 90 s."""
    counts = {
        name: {"count": 7, "age_seconds": 90.0 if age is None else age, "has_changed": age is not None}
        for name, age in ages.items()
    }
    return {"role": "learner", "name": "learner", "healthy": True, "progress": counts}


@pytest.mark.parametrize(("report", "problem"), [
    (counted(updates=59.0, segments=0.0), "none"),
    (counted(updates=75.0, segments=0.0), "no updates for 75 s"),
    (counted(updates=None, segments=75.0), "no segments for 75 s"),  # it waits for a replay that no longer fills
    (counted(updates=None, segments=1.0), "none"),  # the replay fills
    (counted(updates=None, segments=None), "none"),  # it starts
    (counted(evaluations=5000.0), "none"),  # games are long
    ({"role": "replay", "peers": {"learner": None, "actors": [{}]}}, "has no learner"),
])  # fmt: skip
def test_counts_that_no_longer_grow_are_a_problem(
    served: Served, capsys: pytest.CaptureFixture[str], report: dict[str, Any], problem: str
) -> None:
    assert ("problems", problem) in list(summary(report))
    served.content |= report
    assert status_command.run([served.address]) == status_command.run(["--fleet", os.devnull, served.address])
    assert status_command.run([served.address]) == (problem != "none")
    assert capsys.readouterr().out.count(problem) >= 3


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
    assert "7 updates (0 s ago)" in " ".join(lines[1])
    assert lines[2] == ["evaluator", "unreachable", gone]
    assert lines[4:6] == [["problems"], ["evaluator", *lines[5][1:]]]
    assert "does not answer: Connection refused" in " ".join(lines[5])
    assert lines[7:] == [["warnings"], ["learner", "the", "learner", "waits", "for", "batches"]]
    assert status_command.run([served.address, f"evaluator={gone}", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {served.address: served.content, gone: None}
    assert status_command.run([served.address, served.address]) == 0


def test_fleet_that_names_no_process_is_wrong_usage(tmp_path: Path) -> None:
    for arguments in ([], ["--fleet", os.devnull], ["--fleet", str(tmp_path / "missing")]):
        with pytest.raises(UsageError, match=r"give an ADDRESS|cannot be read: No such file"):
            status_command.run(arguments)


def test_summary_of_a_supervisor_has_a_line_for_each_role() -> None:
    lost = {"role": "actor", "peers": {"replay": "lost"}, "metrics": {"actor/steps_per_second": 0.0}}
    states = {"learner": "running", "actor-0": "restarted 1x"}
    assert list(summary({"roles": states, "reports": {"learner": LEARNER, "actor-0": lost}})) == [
        ("learner", "running, learns, 277.12 updates/s, waits 3% of the time"),
        ("actor-0", "restarted 1x, waits for replay (lost), 0.00 steps/s"),
        ("problems", "actor-0: is not connected to replay (lost)"),
    ]


# Every value ------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ("peers", "metrics", "checkpoint", "reports", "roles", "updates", "weights_version", "steps_per_second")
OF_PROGRESS = ("progress", "errors", "warnings", "weights_age_seconds")
HEADS = st.fixed_dictionaries({}, optional=dict.fromkeys((*status_command.HEAD, *FIELDS, *OF_PROGRESS), JSON))


@settings(max_examples=20, deadline=None)
@given(head=HEADS, rest=st.dictionaries(st.text(), JSON, max_size=3), healthy=st.booleans())
def test_any_report_is_a_table_of_printable_lines(head: dict[str, Any], rest: dict[str, Any], healthy: bool) -> None:
    lines = status_command.table(healthy, rest | head)
    assert all(line.isprintable() for line in lines)
    assert len(lines) - len(rest_of(lines)) <= 25


@pytest.mark.parametrize(("name", "value", "text"), [
    ("memory_bytes", 3 * 2**30, "3,072.0 MiB"),
    ("updates", 1234567, "1,234,567"),
    ("limit", None, "none"),
    ("charts/learning_rate", 6.25e-5, "6.25e-05"),
    ("age_seconds", 0.0, "0.00"),
    ("reports.learner.pid", 26390, "26390"),
    ("versions.protocol", 26390, "26390"),
    ("odd", 1e300, "1e+300"),
    ("odd", 10**30, str(10**30)),
])  # fmt: skip
def test_numbers_have_units_and_separators(name: str, value: object, text: str) -> None:
    assert status_command.table(True, {name: value})[-1].split(maxsplit=1)[1:] == [text]


@pytest.mark.parametrize(("seconds", "text"), [
    (3723.9, "1:02:03"), (90000, "1 day, 1:00:00"), (-1, "-1"), (1e12, "1000000000000.0"), (None, ""), ("long", "long"),
])  # fmt: skip
def test_valid_uptime_is_shown_as_a_duration(seconds: object, text: str) -> None:
    assert status_command.table(True, {"uptime_seconds": seconds})[0].endswith(f": healthy, up {text}")
