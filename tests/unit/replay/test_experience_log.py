"""The log of the replay: a torn end is cut off, and reading stops at the first damaged record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from apex_jax.host import disk
from apex_jax.replay import experience_log
from apex_jax.replay.experience_log import ExperienceLog
from apex_jax.replay.snapshots import FileHeader, JournalError
from tests.rigs.journals import World, files, flip, head_bytes, warnings
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS


def opened(directory: Path) -> ExperienceLog:
    return ExperienceLog(directory / "replay", FileHeader(CONFIG.compatibility_key, SPEC), 9)


def restarted(directory: Path) -> World:
    """Returns a replay that continues from its directory as after a kill."""
    world = World(directory, capacity=9)
    world.kill()
    return world


def store(directory: Path, *starts: tuple[int, ...]) -> list[Path]:
    """Stores segments, one file for each start of the server; returns the files."""
    for numbers in starts:
        world = World(directory, capacity=9)
        world.store(*numbers)
        world.kill()
    return files(directory, "segments")


@pytest.mark.parametrize("kept", [1, 100, -1], ids=["in its header", "in its body", "by a byte"])
def test_torn_end_of_a_killed_server_is_cut_off_without_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    [path] = store(tmp_path, (1, 2))
    size, head = path.stat().st_size, head_bytes(restarted(tmp_path))
    os.truncate(path, (head + size) // 2 + kept if kept > 0 else size - 1)
    assert restarted(tmp_path).numbers() == [1]
    assert path.stat().st_size == (head + size) // 2
    store(tmp_path, (2,))
    assert restarted(tmp_path).numbers() == [1, 2]
    assert warnings(caplog) == []


def test_file_that_was_made_but_not_written_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store(tmp_path, (1, 2))
    (tmp_path / "replay" / f"segments-{3:020}-000001.log").touch()
    store(tmp_path, (3,), (4,))
    assert restarted(tmp_path).numbers() == [1, 2, 3, 4]
    assert warnings(caplog) == []


def test_records_that_were_written_again_after_a_disk_error_are_read_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk has accepted two records and a part of the third one, and then has not even let them be cut off."""
    first, second = store(tmp_path, (1,), (2, 3, 4))
    written, size = second.read_bytes(), (second.stat().st_size - head_bytes(restarted(tmp_path))) // 3
    with open(first, "ab") as file:
        file.write(written[-3 * size : -size + 9])
    world = restarted(tmp_path)
    assert world.numbers() == [1, 2, 3, 4]
    assert world.counters.ledger.totals(())["stored"] == 4 * TRANSITIONS
    assert warnings(caplog) == []


@pytest.mark.parametrize("place", [8, experience_log.HEADER_BYTES, "cut"], ids=["header", "body", "cut off"])
def test_fault_10_the_log_is_read_up_to_its_first_damaged_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: int | str
) -> None:
    paths = store(tmp_path, (1, 2, 3), (4, 5), (6,))
    damaged, size, head = paths[0], paths[0].stat().st_size, head_bytes(restarted(tmp_path))
    start = head + (size - head) // 3
    if isinstance(place, int):
        flip(damaged, start + place)  # of 2
    else:
        os.truncate(damaged, start + 99)
    before = {path.name: path.read_bytes() for path in paths}
    world = World(tmp_path, capacity=9)
    assert world.numbers() == [1]
    assert world.counters.ledger.totals(())["stored"] == TRANSITIONS
    [line] = warnings(caplog)
    assert line.startswith(f"{damaged} is damaged at byte {start} (")
    assert f"its last {len(before[damaged.name]) - start} bytes and 2 later files are left out" in line
    world.store(7, 8)
    world.kill()
    assert restarted(tmp_path).numbers() == [1, 7, 8]
    assert warnings(caplog) == [], "once is enough"
    aside = {path.name: path.read_bytes() for path in (tmp_path / "replay").glob("damaged-*")}
    assert {name.removeprefix("damaged-").rpartition("-")[0]: data for name, data in aside.items()} == before


def test_server_killed_while_it_sets_files_aside_continues_at_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = store(tmp_path, (1, 2), (3,), (4,))
    flip(first, -1)

    def set_one_aside(path: Path) -> None:
        if list(path.parent.glob("damaged-*")):
            raise KeyboardInterrupt
        disk.set_damaged_aside(path)

    monkeypatch.setattr(f"{experience_log.__name__}.set_damaged_aside", set_one_aside)
    with pytest.raises(KeyboardInterrupt):
        World(tmp_path, capacity=9)
    monkeypatch.undo()
    assert restarted(tmp_path).numbers() == [1]
    assert files(tmp_path, "segments") == [first]


def test_disk_that_cannot_set_files_aside_ends_the_server_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = store(tmp_path, (1, 2), (3,))
    flip(first, -1)

    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(f"{experience_log.__name__}.set_damaged_aside", fail)
    with pytest.raises(JournalError, match=r"is damaged and cannot be set aside .*: make room, or move it away"):
        World(tmp_path, capacity=9)
    assert files(tmp_path, "segments") == [first, second]
