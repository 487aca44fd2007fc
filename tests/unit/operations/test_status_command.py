"""The command status prints a process's report as a table, or one line that says why there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apex_jax.host.errors import UsageError
from apex_jax.operations import status_command
from tests.rigs.links import free_address
from tests.rigs.processes import Programs
from tests.rigs.statuses import Served, served

__all__ = ["served"]


def rest_of(table: list[str]) -> list[str]:
    """Returns the rows that follow the summary."""
    return table[table.index("") + 1 :]


def test_table_contains_no_control_characters_of_a_peer(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.content |= {
        "pid": 7,
        "uptime_seconds": 61.2,
        "progress_age_seconds": 75.0,
        "memory_bytes": 2**21,
        "rates": {"updates_per_second": 12.345},
        "peers": [{"peer_id": "ab"}],
        "\x1b[2J": "\x1b]0;evil\x07",
    }
    assert status_command.run([served.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "learner (learner, pid 7): healthy, up 0:01:01"
    assert [line.split() for line in rest_of(lines)[:3]] == [
        ["memory_bytes", "2.0", "MiB"],
        ["rates.updates_per_second", "12.35"],
        ["peers.0.peer_id", "ab"],
    ]
    assert all(line.isprintable() for line in lines)
    served.healthy = False
    assert status_command.run([served.address]) == 1
    assert "NOT HEALTHY: no progress for 75.00 s" in capsys.readouterr().out
    assert status_command.run([served.address, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == served.content


def test_missing_answer_is_a_one_line_error(tmp_path: Path) -> None:
    with Programs(tmp_path) as programs:
        silent, wrong = programs.start("status", free_address()), programs.start("status", "nonsense")
        assert silent.exit_code() == 1
        assert silent.stderr.startswith("error: tcp://127.0.0.1:")
        assert silent.stderr.count("\n") == 1
        assert wrong.exit_code() == 2
        assert wrong.stderr.startswith("error: nonsense: give tcp://HOST:PORT")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:80", "tcp://127.0.0.1", "tcp://:80", "tcp://x:0", "udp://x:1", "", "ipc://"]
)
def test_invalid_address_is_wrong_usage(address: str) -> None:
    with pytest.raises(UsageError, match=r"give tcp://HOST:PORT or ipc://PATH"):
        status_command.run([address])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
FIELDS = (
    "peers",
    "metrics",
    "checkpoint",
    "reports",
    "roles",
    "updates",
    "weights_version",
    "phase",
    "steps_per_second",
)
HEADS = st.fixed_dictionaries({}, optional=dict.fromkeys((*status_command.HEAD, *FIELDS), JSON))


@given(head=HEADS, rest=st.dictionaries(st.text(), JSON, max_size=6), healthy=st.booleans())
def test_any_report_is_a_table_of_printable_lines(head: dict[str, Any], rest: dict[str, Any], healthy: bool) -> None:
    lines = status_command.table(healthy, rest | head)
    assert all(line.isprintable() for line in lines)
    assert len(rest_of(lines)) <= status_command.MAX_ROWS
    assert len(lines) - len(rest_of(lines)) <= 25


def test_table_has_one_row_for_each_leaf_up_to_its_limit_and_none_for_values_in_the_first_line() -> None:
    content = {"role": "actor", "name": "actor-0", "pid": 7, "deep": {"list": [1, {"x": True}], "empty": {}}}
    assert [line.split() for line in rest_of(status_command.table(True, content))] == [
        ["deep.list.0", "1"], ["deep.list.1.x", "true"],
    ]  # fmt: skip
    many = {"many": list(range(2 * status_command.MAX_ROWS))}
    assert len(rest_of(status_command.table(True, content | many))) == status_command.MAX_ROWS


@pytest.mark.parametrize(("name", "value", "text"), [
    ("memory_bytes", 3 * 2**30, "3,072.0 MiB"),
    ("updates", 1234567, "1,234,567"),
    ("rate", 1234.567, "1,234.57"),
    ("is_ready", False, "false"),
    ("limit", None, "none"),
    ("charts/learning_rate", 6.25e-5, "6.25e-05"),
    ("age_seconds", 0.0, "0.00"),
    ("weights_version", 26390, "26390"),
    ("odd", 1e300, "1e+300"),
    ("odd", math.nan, "nan"),
    ("odd", 10**30, str(10**30)),
])  # fmt: skip
def test_numbers_have_units_and_separators(name: str, value: object, text: str) -> None:
    assert status_command.table(True, {name: value})[-1].split(maxsplit=1)[1:] == [text]


@pytest.mark.parametrize(("seconds", "text"), [
    (3723.9, "1:02:03"), (90000, "1 day, 1:00:00"), (0, "0:00:00"), (-1, "-1"), (1e12, "1000000000000.0"),
    (None, ""), ("long", "long"), (math.nan, "nan"),
])  # fmt: skip
def test_valid_uptime_is_shown_as_a_duration(seconds: object, text: str) -> None:
    assert status_command.table(True, {"uptime_seconds": seconds})[0].endswith(f": healthy, up {text}")
