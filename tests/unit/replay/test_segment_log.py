"""The log of segments: torn ends and damaged records cost themselves alone."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from apex_jax.replay import segment_log
from apex_jax.replay.segment_log import SegmentLog
from apex_jax.transport.messages import SegmentMessage
from tests.rigs.journals import RUN, World, files, flip, head_bytes, warnings
from tests.rigs.links import TRANSITIONS, highest


def test_torn_end_is_cut_off_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_only_the_damaged_record_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_records_after_a_damage_survive_its_repair(tmp_path: Path) -> None:
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


def test_record_with_impossible_numbers_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_numbers_that_the_reader_would_reject_are_not_written(tmp_path: Path, field: str) -> None:
    world = World(tmp_path)
    numbers: dict[str, Any] = {"insertion_id": 1, "run_id": RUN, "sequence": 1, "environment_steps": 1, field: 2**63}
    with pytest.raises(AssertionError, match=str(2**63)):
        world.journal._log.append(segment_log.SEGMENT, **numbers)
    world.store(1)
    world.kill()
    world = World(tmp_path)
    assert world.numbers() == [1]
    world.kill()


def test_header_inside_a_body_does_not_hide_the_next_record(tmp_path: Path) -> None:
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
