"""A short run of the fuzzer, which every socket survives. Long: `python -m tests.fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import SOCKETS, fuzz
from tests.fuzz.files import fuzz_files
from tests.fuzz.tcp import fuzz_tcp

MESSAGES = 10_000


@pytest.mark.parametrize("link", SOCKETS)
def test_fault_26_hostile_messages_neither_end_a_service_nor_grow_it(link: str) -> None:
    figures = fuzz(link, MESSAGES, seed=1)
    assert figures["failures"] == []
    assert sum(figures["dropped"].values()) > MESSAGES / 8


def test_damaged_files_of_others_open_or_are_refused_in_one_line_and_lead_nowhere_else(tmp_path: Path) -> None:
    figures = fuzz_files(tmp_path, 60, seed=1)
    assert figures["failures"] == []
    assert len(figures["outcomes"]) >= 5, "of three kinds, each opened and refused"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("has_keys", [False, True], ids=["without keys", "with keys"])
def test_fault_27_strangers_and_hundreds_of_open_handshakes_do_not_disturb_the_fleet(
    tmp_path: Path, has_keys: bool
) -> None:
    assert fuzz_tcp(tmp_path, connections=60, seed=1, has_keys=has_keys)["failures"] == []
