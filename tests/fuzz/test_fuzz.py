"""A short run of the fuzzer: its messages cover all kinds, and every socket survives. Long: `python -m tests.fuzz`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_jax.transport import wire
from apex_jax.types import MAX_SEGMENT_BYTES, Array, Buffer
from tests.fuzz.__main__ import SOCKETS, fuzz
from tests.fuzz.files import fuzz_files
from tests.fuzz.messages import Fuzzer
from tests.fuzz.tcp import ATTACKS, ATTACKS_ON_KEYS, BEHIND_THE_HANDSHAKE, fuzz_tcp
from tests.rigs.links import CONFIG

MESSAGES = {"status": 2_000}  # a connection each; the other ends get 20,000 messages
COUNTED_SHARE = 0.99  # at least, of what must be refused: who is cut off may lose what is under way to it


def reason_of(frames: list[bytes]) -> str:
    try:
        return type(wire.decode(frames)).__name__
    except wire.WireError as error:
        return error.reason


@pytest.mark.parametrize("link", SOCKETS)
def test_fault_26_hostile_messages_neither_end_a_service_nor_grow_it(link: str) -> None:
    messages = MESSAGES.get(link, 20_000)
    figures = fuzz(link, messages, seed=1)
    assert figures["failures"] == []
    assert sum(figures["dropped"].values()) > messages / 8
    counted = sum(figures["dropped"].get(reason, 0) for reason in wire.WireError.REASONS)
    refusable = sum(figures["refusable"].values())
    assert COUNTED_SHARE * refusable <= counted <= refusable


def test_damaged_files_of_others_open_or_are_refused_in_one_line_and_lead_nowhere_else(tmp_path: Path) -> None:
    figures = fuzz_files(tmp_path, 120, seed=1)
    assert figures["failures"] == []
    assert {f"{kind} {end}" for kind in ("run", "folder", "packed") for end in ("opened", "refused")} == set(
        figures["outcomes"]
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("has_keys", [False, True], ids=["without keys", "with keys"])
def test_fault_27_strangers_at_the_ports_do_not_disturb_the_fleet(tmp_path: Path, has_keys: bool) -> None:
    figures = fuzz_tcp(tmp_path, connections=60, seed=1, half_open=20, has_keys=has_keys)
    assert figures["failures"] == []
    assert figures["attacks"].keys() == {
        "held_open", *ATTACKS, *(ATTACKS_ON_KEYS if has_keys else BEHIND_THE_HANDSHAKE)
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fault_27_hundreds_of_half_open_handshakes_do_not_disturb_the_fleet(tmp_path: Path) -> None:
    assert fuzz_tcp(tmp_path, connections=600, seed=2)["failures"] == []


def test_fuzzer_covers_every_kind_and_every_refusal() -> None:
    fuzzer = Fuzzer(wire.MESSAGES, 1, CONFIG.compatibility_key)
    reached = Counter(reason_of(fuzzer.next()) for _ in range(20_000))
    assert reached.keys() == {kind.__name__ for kind in wire.MESSAGES} | set(wire.WireError.REASONS)
    sound = sum(number for reason, number in reached.items() if reason not in wire.WireError.REASONS)
    assert 0.1 < sound / reached.total() < 0.6, "some must get through, or nothing behind the wire is tested"


def test_fuzzer_sends_the_same_messages_for_the_same_seed() -> None:
    first, second = (Fuzzer(wire.MESSAGES, 7, CONFIG.compatibility_key) for _ in range(2))
    assert [first.next() for _ in range(500)] == [second.next() for _ in range(500)]


@pytest.mark.parametrize("kind", wire.MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_wrong_lengths_in_a_header_read_no_bytes_beyond_the_message(kind: type, data: st.DataObject) -> None:
    fuzzer = Fuzzer([kind], data.draw(st.integers(0, 2**32)), CONFIG.compatibility_key)
    frames = fuzzer.next()
    try:
        message = wire.decode(frames)
    except wire.WireError:
        return
    values: tuple[Any, ...] = tuple(message)
    for (_, mark), value in zip(wire._SCHEMA_OF[type(message)].fields, values, strict=True):
        if isinstance(mark, Array):
            assert value.size <= mark.max_size
            assert any(value.nbytes == len(frame) for frame in frames)
        elif isinstance(mark, Buffer):
            assert len(value) <= max(map(len, frames)) <= MAX_SEGMENT_BYTES
