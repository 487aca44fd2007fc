"""A minute of the chaos soak with one replay server, and with three. Long: `python -m tests.chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_fault_38_a_minute_of_chaos_violates_no_invariant(tmp_path: Path) -> None:
    soak_for_a_minute(tmp_path, servers=1)


def test_fault_40_a_minute_of_chaos_with_three_replay_servers_violates_no_invariant(tmp_path: Path) -> None:
    soak_for_a_minute(tmp_path, servers=3)


def soak_for_a_minute(folder: Path, servers: int) -> None:
    figures = soak(folder, minutes=1, seed=1, servers=servers)
    assert figures["violations"] == [], figures
    assert sum(figures["faults"].values()) >= 2
