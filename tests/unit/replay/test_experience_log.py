"""The log of segments: a torn end is cut off, and each file is read up to its first damaged record."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from apex_jax.replay import experience_log
from apex_jax.replay.experience_log import ExperienceLog
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


@pytest.mark.parametrize("place", [8, experience_log.HEADER_BYTES], ids=["header", "body"])
def test_fault_10_each_file_is_read_up_to_its_first_damaged_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    for numbers in ((1, 2, 3), (4, 5)):
        world = World(tmp_path, capacity=9)
        world.store(*numbers)
        world.kill()
    first, second = files(tmp_path, "segments")
    record_bytes = (second.stat().st_size - head_bytes(world)) // 2
    start = head_bytes(world) + record_bytes
    flip(first, start + place)  # of 2
    damaged = first.read_bytes()
    for _ in range(2):
        world = World(tmp_path, capacity=9)
        assert world.numbers() == [1, 4, 5]
        assert world.counters.ledger.totals((), {})["stored"] == 3 * TRANSITIONS
        line, summary = warnings(caplog)
        assert line == f"{first}: the record at {start} is damaged: {2 * record_bytes} bytes are left out"
        assert f"{2 * record_bytes} bytes from damaged records on" in summary
        world.buffer.check_valid()
        world.kill()
    assert first.read_bytes() == damaged, "it may be repaired"


def test_records_after_a_damage_survive_its_repair(tmp_path: Path) -> None:
    for damaged_record in (0, 3):  # 0 = the head of the file
        directory = tmp_path / str(damaged_record)
        world = World(directory, capacity=50)
        world.store(*range(1, 11))
        world.kill()
        [path] = files(directory, "segments")
        sound, head = path.read_bytes(), head_bytes(world)
        flip(path, damaged_record and head + (damaged_record - 1) * (len(sound) - head) // 10 + 8)
        world = World(directory, capacity=50)
        assert world.numbers() == [*range(1, damaged_record)]
        world.store(*range(11, 21))
        world.kill()
        path.write_bytes(sound)
        world = World(directory, capacity=50)
        assert world.numbers()[-10:] == [*range(11, 21)]
        world.kill()


def test_header_inside_a_body_does_not_hide_the_next_record(tmp_path: Path) -> None:
    world = World(tmp_path)
    log = world.journal._log
    forger = ExperienceLog(tmp_path / "forger", log._identity, 4)
    forger.last_event = 1
    forger.append(experience_log.SEGMENT, 9, RUN, 9, body=bytes(10_000))
    body = b"apxr" + forger._pending[0].header  # of a record that is longer than the file
    forger.close()
    last = highest(SegmentMessage, "sequence")
    for number, sequence in ((1, last), (2, 2), (3, 3)):
        log.append(experience_log.SEGMENT, number, RUN, sequence, body=body, crc=zlib.crc32(body))
    world.kill()
    log = ExperienceLog(world.journal.directory, log._identity, 4)
    assert [(record.sequence, record.body) for record in log.read()] == [(n, body) for n in (last, 2, 3)]
    assert not log.left_out
    log.close()


def test_unreadable_file_whose_name_claims_the_largest_event_does_not_end_the_server(tmp_path: Path) -> None:
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay" / f"segments-{'9' * 20}-000001.log").write_bytes(b"foreign")
    for numbers in ([1], [1, 2]):
        world = World(tmp_path)
        world.store(numbers[-1])
        assert world.numbers() == numbers
        world.kill()
