"""The journal: what was acknowledged is there after a kill, once, whatever the disk does and whatever is damaged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.replay.header import JournalError
from apex_jax.types import SegmentRecord
from tests.rigs.journals import RUN, World, config_of, files, first_leaves, flip
from tests.rigs.links import TRANSITIONS
from tests.rigs.validity import check_buffer


def restarted(directory: Path, capacity: int = 4, **config: Any) -> World:
    """Returns a replay that continues from its directory, and has let go of it."""
    world = World(directory, capacity, config_of(directory, **config))
    world.kill()
    return world


# Starting again ---------------------------------------------------------------------------------------------------


def test_fault_05_restart_after_a_stop_restores_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    empty = World(tmp_path, capacity=3)
    assert (empty.numbers(), empty.ledger.steps, caplog.messages) == ([], 0, [])
    empty.stop()
    before = World(tmp_path, capacity=3)
    before.store(1, 2, 3, 4, 5, now_seconds=2.0)
    before.learn(4, 9.0)
    before.sample(2, 3, 2.0)
    before.ledger.report(RUN, 99, is_late=True)
    before.ledger.report(2**63 - 1, 2**48, is_late=True)
    before.ledger.refuse(RUN, 6, 99, 3, "bad_checksum")
    before.ledger.highest_actor_number = 5
    before.stop()
    after = restarted(tmp_path, capacity=3)
    state = after.buffer.state(0.0)
    for name, value in before.buffer.state(0.0)._asdict().items():
        if name != "ages_seconds":
            np.testing.assert_array_equal(getattr(state, name), value, err_msg=name)
    assert (after.limiter.inserted, after.limiter.sampled) == (5 * TRANSITIONS, 6)
    assert (after.ledger.steps, after.ledger.highest_actor_number) == (99, 5)
    assert after.ledger.totals() == before.ledger.totals()
    assert after.journal.header.replay_id == before.journal.header.replay_id
    for one, other in zip(before.sample(2, 4, 0.0), after.sample(2, 4, 0.0), strict=True):
        np.testing.assert_array_equal(one, other)
    check_buffer(after.buffer)


def test_restart_after_a_kill_restores_every_segment_and_count(tmp_path: Path) -> None:
    before = World(tmp_path)
    before.store(1, 2)
    before.learn(2, 9.0)
    before.refuse(SegmentRecord(RUN, 3, 30, 4, b"x", 0), "bad_frames")
    before.save()
    before.store(4)
    before.learn(4, 9.0)
    before.journal.on_welcome(78, 9)
    before.kill()
    after = restarted(tmp_path)
    assert after.numbers() == [1, 2, 4]
    assert after.leaves()[1] == first_leaves(1)
    assert max(after.leaves()[2]) == 9.0**0.6, "as the snapshot knows"
    assert after.leaves()[4] == first_leaves(4), "no snapshot knows of it"
    assert (after.ledger.steps, after.ledger.highest_actor_number) == (40, 9)
    assert after.ledger.totals() == before.ledger.totals()
    assert after.ledger.sequence(RUN) == 4
    assert after.limiter.inserted == 3 * TRANSITIONS


def test_replay_without_a_journal_starts_empty(tmp_path: Path) -> None:
    for _ in range(2):
        world = World(tmp_path, config=config_of(tmp_path, journal=False))
        assert world.numbers() == []
        world.store(1)
        world.stop()
    assert not list(tmp_path.iterdir())


def test_changed_exponent_restores_initial_priorities_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = World(tmp_path, config=config_of(tmp_path, priority_exponent=0.7))
    before.store(1)
    before.learn(1, 9.0)
    before.stop()
    assert restarted(tmp_path).leaves()[1] == first_leaves(1)
    assert any("priority_exponent was 0.7, is now 0.6" in message for message in caplog.messages)


def test_changed_ratio_resets_the_limiter(tmp_path: Path) -> None:
    before = World(tmp_path)
    before.store(1, 2)
    before.limiter.sampled += 1_000
    before.stop()
    limiter, inserted = restarted(tmp_path, samples_per_insert=2.0).limiter, 2 * TRANSITIONS
    assert (limiter.inserted, limiter.sampled) == (inserted, 2 * (inserted - 1)), "as if it had held"


# Whose it is ------------------------------------------------------------------------------------------------------


def test_a_directory_is_for_one_server_at_a_time(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(JournalError, match="another replay server is using"):
        World(tmp_path)
    world.kill()
    World(tmp_path).kill()


@pytest.mark.parametrize("kind", ["segments", "snapshot"])
def test_no_flipped_or_missing_byte_causes_a_traceback_or_a_wrong_restore(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="apex_jax")
    world = World(tmp_path)
    world.store(1, 2)
    for number in (1, 2):
        world.learn(number, 10.0 + number)
    world.sample(1, 2, 0.0)
    world.stop()
    learned = world.leaves()
    [path] = files(tmp_path, kind)
    whole = path.read_bytes()
    for offset in range(0, len(whole), 13):
        flipped = bytes([*whole[:offset], whole[offset] ^ 1 << offset % 8, *whole[offset + 1 :]])
        for data in (flipped, whole[:offset]):
            path.write_bytes(data)
            after = restarted(tmp_path)
            leaves = after.leaves()
            numbers = list(leaves)
            assert numbers in ([], [1], [1, 2]) if kind == "segments" else numbers == [1, 2]
            is_refused = bool(list(path.parent.glob("damaged-snapshot-*")))  # some bytes of a zip file mean nothing
            assert is_refused or kind == "segments" or data == flipped
            priorities = {number: first_leaves(number) for number in numbers} if is_refused else learned
            assert leaves == {number: priorities[number] for number in numbers}
            assert after.ledger.steps == 20 or kind == "segments"
            for aside in path.parent.glob("damaged-*"):
                aside.unlink()
    path.write_bytes(whole)
    assert restarted(tmp_path).leaves() == learned


def test_what_is_written_after_a_file_without_a_sound_byte_is_kept(tmp_path: Path) -> None:
    World(tmp_path, capacity=10).kill()
    for numbers in ((1, 2), (3, 4)):
        world = World(tmp_path, capacity=10)
        world.store(*numbers)
        world.stop()
    flip(files(tmp_path, "segments")[-1], 20)  # in its first record
    world = World(tmp_path, capacity=10)
    world.store(5, 6)
    world.kill()
    assert set(restarted(tmp_path, capacity=10).numbers()) >= {5, 6}
