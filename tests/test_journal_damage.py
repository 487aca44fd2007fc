"""Files of the journal that are damaged: it costs what is damaged, never more, and never a traceback."""

from __future__ import annotations

import logging
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.replay import segment_log
from apex_jax.replay.file_heads import CorruptFile, pack
from apex_jax.replay.ledger import COLUMNS
from apex_jax.replay.saved_state import unpack_state
from apex_jax.replay.segment_log import SegmentLog
from apex_jax.transport.messages import SegmentMessage
from tests.journals import RUN, World, files, first_leaves, warnings
from tests.links import SPEC, TRANSITIONS, highest


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def test_a_torn_end_is_cut_off_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path)
    world.store(1, 2)
    world.kill()
    [path] = files(tmp_path, "segments")
    os.truncate(path, path.stat().st_size - 1)
    world = World(tmp_path)
    assert world.numbers() == [1]
    assert [message.partition(": ")[2] for message in warnings(caplog)] == ["1 torn records"]
    world.store(2)
    world.kill()
    world = World(tmp_path)
    assert world.numbers() == [1, 2]
    assert warnings(caplog) == []
    world.kill()


def test_a_damaged_record_is_left_out_and_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for numbers in ((1, 2, 3), (4, 5)):
        world = World(tmp_path, capacity=9)
        world.store(*numbers)
        world.kill()
    first, second = files(tmp_path, "segments")
    record_bytes = (second.stat().st_size - (first_head := head_bytes(world))) // 2
    flip(first, first_head + segment_log.HEADER_BYTES + record_bytes)  # in the body of 2
    world = World(tmp_path, capacity=9)
    assert world.numbers() == [1, 3, 4, 5]
    assert world.counters.ledger.totals((), {})["stored"] == 5 * TRANSITIONS, "it was stored, once"
    assert "1 damaged records" in warnings(caplog)[0]
    world.buffer.check_valid()
    world.kill()
    flip(first, first_head + record_bytes + 8)  # in the header of 2
    world = World(tmp_path, capacity=9)
    assert world.numbers() == [1, 3, 4, 5]
    place, summary = warnings(caplog)
    assert (
        place
        == f"{first}: {record_bytes} bytes from {first_head + record_bytes} on are left out: no record begins there"
    )
    assert "1 damaged records" in summary
    world.buffer.check_valid()
    world.kill()


def test_what_is_stored_behind_damage_is_still_there_when_the_damage_is_repaired(tmp_path: Path) -> None:
    for place in (0, 8):  # in the head of the file, in the header of its first record
        directory = tmp_path / str(place)
        world = World(directory, capacity=50)
        world.store(*range(1, 11))
        world.kill()
        [path] = files(directory, "segments")
        sound = path.read_bytes()
        flip(path, place and head_bytes(world) + place)
        world = World(directory, capacity=50)
        assert world.numbers() == ([*range(2, 11)] if place else [])
        world.store(*range(11, 21))
        world.kill()
        path.write_bytes(sound)
        world = World(directory, capacity=50)
        assert world.numbers()[-10:] == [*range(11, 21)]
        world.kill()


def test_a_record_of_numbers_that_were_never_written_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for field in ("insertion_id", "run_id", "sequence", "environment_steps"):
        directory = tmp_path / field
        world = World(directory)
        world.store(1)
        number, run_id, sequence, steps = (
            2**63 if name == field else 2 for name in ("insertion_id", "run_id", "sequence", "environment_steps")
        )
        with monkeypatch.context() as careless:
            careless.setattr(segment_log, "_is_believable", lambda *_: True)
            world.journal._log.append(segment_log.SEGMENT, number, run_id, sequence, steps)
        world.kill()
        world = World(directory)
        assert world.numbers() == [1]
        world.store(3)
        world.save()
        world.kill()


@pytest.mark.parametrize("field", ["insertion_id", "run_id", "sequence", "environment_steps"])
def test_a_number_that_would_not_be_believed_is_not_written(tmp_path: Path, field: str) -> None:
    world = World(tmp_path)
    numbers: dict[str, Any] = {"insertion_id": 1, "run_id": RUN, "sequence": 1, "environment_steps": 1, field: 2**63}
    with pytest.raises(AssertionError, match=str(2**63)):
        world.journal._log.append(segment_log.SEGMENT, **numbers)
    world.store(1)
    world.kill()
    world = World(tmp_path)
    assert world.numbers() == [1]
    world.kill()


def test_a_header_within_a_sound_body_hides_no_record_behind_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    log = world.journal._log
    forger = SegmentLog(tmp_path / "forger", log._identity, 4)
    forger.last_event = 1
    forger.append(segment_log.SEGMENT, 9, RUN, 9, body=bytes(10_000))
    body = b"apxr" + forger._pending[0].header  # of a record that is longer than the file
    forger.close()
    last = highest(SegmentMessage, "sequence")
    for number, sequence in ((1, last), (2, 2), (3, 3)):
        log.append(segment_log.SEGMENT, number, RUN, sequence, body=body, crc=zlib.crc32(body))
    world.kill()
    log = SegmentLog(world.journal.directory, log._identity, 4)
    assert [(record.sequence, record.body) for record in log.read()] == [(n, body) for n in (last, 2, 3)]
    assert not log.left_out
    log.close()


def test_segments_that_only_a_snapshot_knows_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segment_log, "FILE_BYTES", 1_000)
    world = World(tmp_path, capacity=100)
    for number in range(1, 41):
        world.store(number)
    world.stop()
    for path in files(tmp_path, "segments")[3:5]:
        path.unlink()
    world = World(tmp_path, capacity=100)
    missing = 40 - len(world.numbers())
    assert missing > 0
    assert f"{missing} missing segments" in warnings(caplog)[0]
    world.kill()


def head_bytes(world: World) -> int:
    return len(pack(segment_log.MAGIC, world.journal._log._identity.facts))


def test_priorities_stay_with_their_segments_where_one_is_missing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store(1, 2, 3)
    for number in (1, 2, 3):
        world.learn(number, 10.0 * number)
    world.stop()
    [path] = files(tmp_path, "segments")
    record_bytes = (path.stat().st_size - head_bytes(world)) // 3
    flip(path, head_bytes(world) + record_bytes + segment_log.HEADER_BYTES)  # of 2
    for _ in range(3):
        world = World(tmp_path)
        assert {number: max(leaves) for number, leaves in world.leaves().items()} == {1: 10**0.6, 3: 30**0.6}
        world.stop()
    world = World(tmp_path)
    world.store(4, 5, 6)
    assert world.numbers() == [3, 4, 5, 6]
    world.buffer.check_valid()
    world.kill()


def test_a_damaged_snapshot_is_said_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    world.store(1)
    world.learn(1, 9.0)
    world.save()
    world.store(2)
    world.learn(1, 99.0)
    world.save()
    world.kill()
    flip(files(tmp_path, "snapshot")[-1], -1)
    world = World(tmp_path)
    assert (world.numbers(), max(world.leaves()[1]), world.counters.environment_steps) == ([1, 2], 9.0**0.6, 20)
    assert len(warnings(caplog)) == 1
    world.save()
    sound = files(tmp_path, "snapshot")
    assert [path.name for path in sound] == ["snapshot-000000000001", "snapshot-000000000003"]
    world.kill()
    World(tmp_path).kill()
    assert warnings(caplog) == []


def test_without_any_snapshot_segments_have_their_first_priorities(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    world.store(1, 2)
    world.learn(1, 9.0)
    world.save()
    world.kill()
    files(tmp_path, "snapshot")[-1].write_bytes(b"")
    world = World(tmp_path)
    assert world.leaves() == {number: first_leaves(number) for number in (1, 2)}
    assert world.counters.ledger.account(RUN).sequence == 2
    assert len(warnings(caplog)) == 1
    world.kill()


@pytest.mark.parametrize("kind", ["segments", "snapshot"])
def test_no_byte_that_is_flipped_or_cut_off_gives_a_traceback_or_a_wrong_restore(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("apex_jax"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("apex_jax.replay.journal"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("apex_jax.replay.segment_log"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("apex_jax.replay.snapshots"), "disabled", True)
    world = World(tmp_path)
    world.store(1, 2)
    for number in (1, 2):
        world.learn(number, 10.0 + number)
    world.buffer.sample(1, 2, 0.0)
    world.stop()
    learned = world.leaves()
    [path] = files(tmp_path, kind)
    whole = path.read_bytes()
    for offset in range(len(whole)):
        flipped = bytes([*whole[:offset], whole[offset] ^ 1 << offset % 8, *whole[offset + 1 :]])
        for data in (flipped, whole[:offset]):
            path.write_bytes(data)
            after = World(tmp_path)
            after.kill()
            leaves = after.leaves()
            numbers = list(leaves)
            assert numbers in ([], [1], [2], [1, 2]) if kind == "segments" else numbers == [1, 2]
            priorities = learned if kind == "segments" else {number: first_leaves(number) for number in numbers}
            assert leaves == {number: priorities[number] for number in numbers}
            assert after.counters.environment_steps == 20 or kind == "segments"
    path.write_bytes(whole)
    after = World(tmp_path)
    assert after.leaves() == learned
    after.kill()


def good_facts() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    world_state = np.random.default_rng(0).bit_generator.state
    facts: dict[str, Any] = {
        "event": 1, "inserted_segments": 1, "priority_exponent": 0.6, "max_priority": 1.0, "random_state": world_state,
        "limiter": {"inserted": 1, "sampled": 0, "ratio": [0.0, 1.0]}, "environment_steps": 1,
        "welcomed": 1, "refused": {}, "forgotten": {},
    }  # fmt: skip
    arrays = {
        "insertion_ids": np.ones(1, np.int64),
        "leaves": np.ones((1, SPEC.slots)),
        "ages_seconds": np.zeros(1),
        "accounts": np.ones((1, COLUMNS), np.int64),
    }
    return facts, arrays


@pytest.mark.parametrize(("name", "value"), [
    ("event", -1), ("event", 1.0), ("event", True), ("event", 2**70), ("inserted_segments", "1"),
    ("priority_exponent", -0.5), ("max_priority", float("nan")), ("max_priority", 1), ("environment_steps", None),
    ("environment_steps", -5), ("welcomed", []), ("limiter", None), ("limiter", {"inserted": 1}),
    ("limiter", {"inserted": 1, "sampled": 0, "ratio": "x"}), ("refused", {"because": 1}), ("refused", [1]),
    ("refused", {"bad_checksum": -1}), ("forgotten", {"stored": 1.5}), ("random_state", None), ("random_state", {}),
    ("random_state", {"bit_generator": "MT19937", "state": {}}),
    ("random_state", {"bit_generator": "PCG64", "state": {"state": 2**128, "inc": 1}, "has_uint32": 0, "uinteger": 0}),
    ("random_state", {"bit_generator": "PCG64", "state": {"state": 1, "inc": "1"}, "has_uint32": 0, "uinteger": 0}),
    ("random_state", {"bit_generator": "PCG64", "state": {"state": 1, "inc": 1}, "has_uint32": 2, "uinteger": 0}),
])  # fmt: skip
def test_a_fact_that_cannot_be_is_damage(name: str, value: Any) -> None:
    facts, arrays = good_facts()
    assert unpack_state(facts, arrays, SPEC.slots).event == 1
    with pytest.raises((CorruptFile, KeyError, TypeError, AttributeError)):
        unpack_state({**facts, name: value}, arrays, SPEC.slots)


@pytest.mark.parametrize(("name", "value"), [
    ("insertion_ids", np.zeros(2, np.int64)), ("insertion_ids", np.full(1, 2)), ("insertion_ids", np.full(1, -1)),
    ("insertion_ids", np.ones(1)),
    ("leaves", np.ones((1, SPEC.slots + 1))), ("leaves", np.full((1, SPEC.slots), np.nan)), ("leaves", np.ones(1)),
    ("leaves", np.full((1, SPEC.slots), np.inf)), ("leaves", np.full((1, SPEC.slots), -1.0)),
    ("ages_seconds", np.full(1, np.nan)), ("ages_seconds", np.zeros(2)), ("accounts", np.ones((1, 3), np.int64)),
    ("accounts", np.full((1, COLUMNS), -1)), ("accounts", np.ones(9, np.int64)),
])  # fmt: skip
def test_an_array_that_cannot_be_is_damage(name: str, value: np.ndarray) -> None:
    facts, arrays = good_facts()
    with pytest.raises(CorruptFile):
        unpack_state(facts, {**arrays, name: value}, SPEC.slots)
