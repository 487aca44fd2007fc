"""A minute of the chaos soak. Long: `python -m tests.chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_fault_38_a_minute_of_chaos_violates_no_invariant(tmp_path: Path) -> None:
    figures = soak(tmp_path, minutes=1, seed=1)
    assert figures["violations"] == [], figures
    assert sum(figures["faults"].values()) >= 2
