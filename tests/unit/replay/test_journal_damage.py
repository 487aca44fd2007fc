"""Damaged files of the journal cause neither a traceback nor a wrong restore."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from apex_jax.replay import segment_log
from tests.rigs.journals import World, files, first_leaves, warnings


def test_segments_that_only_a_snapshot_contains_are_logged(
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


def test_priorities_stay_with_their_segments_if_one_is_missing(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        world = World(tmp_path)
        world.store(number)
        world.learn(number, 10.0 * number)
        world.stop()
    files(tmp_path, "segments")[1].unlink()
    for _ in range(3):
        world = World(tmp_path)
        assert {number: max(leaves) for number, leaves in world.leaves().items()} == {1: 10**0.6, 3: 30**0.6}
        world.stop()
    world = World(tmp_path)
    world.store(4, 5, 6)
    assert world.numbers() == [3, 4, 5, 6]
    world.buffer.check_valid()
    world.kill()


@pytest.mark.parametrize("kind", ["segments", "snapshot"])
def test_no_flipped_or_missing_byte_causes_a_traceback_or_a_wrong_restore(
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
            assert numbers in ([], [1], [1, 2]) if kind == "segments" else numbers == [1, 2]
            priorities = learned if kind == "segments" else {number: first_leaves(number) for number in numbers}
            assert leaves == {number: priorities[number] for number in numbers}
            assert after.counters.environment_steps == 20 or kind == "segments"
    path.write_bytes(whole)
    after = World(tmp_path)
    assert after.leaves() == learned
    after.kill()
