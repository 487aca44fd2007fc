"""The replay as one object, driven without a socket: it stores, draws, learns, dies and goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apex_jax.replay.replay import Replay
from apex_jax.segment_codec import encode_record
from apex_jax.types import SegmentRecord
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, segment_of


def replay_in(directory: Path, journal: bool = True) -> Replay:
    """A replay of four segments that goes on from what its directory holds."""
    settings = replace(CONFIG.replay, capacity_transitions=4 * TRANSITIONS, min_size_to_sample=1, journal=journal)
    config = CONFIG.replace(run_directory=str(directory), replay=settings)
    replay = Replay(config, SPEC, np.random.default_rng(0))
    replay.restore(now_seconds=0.0)
    return replay


def store(replay: Replay, number: int) -> int:
    """Stores a segment as the replay server does; returns its slot in the ring."""
    segment = segment_of(number)
    slot = replay.insert(encode_record(segment, SPEC, 7, number, 10 * number), segment.columns, now_seconds=0.0)
    replay.journal.flush(now_seconds=0.0)
    return slot


def test_insert_returns_the_slot_that_the_learner_receives(tmp_path: Path) -> None:
    replay = replay_in(tmp_path, journal=False)
    assert [store(replay, number) for number in range(1, 7)] == [0, 1, 2, 3, 0, 1]
    assert replay.buffer.segments_since(4, 9).ring_slots.tolist() == [0, 1]


def test_segments_and_priorities_survive_a_kill(tmp_path: Path) -> None:
    before = replay_in(tmp_path)
    store(before, 1)
    draw = before.sample([8], now_seconds=0.0)
    assert before.update_priorities(draw.indices, draw.generations, np.full(8, 5.0)).applied == 8
    before.finish(now_seconds=0.0)  # the newest snapshot
    store(before, 2)
    before.journal.close()  # and no other: killed
    after = replay_in(tmp_path)
    assert [len(after.buffer.segments_since(0, 9).bodies), after.environment_steps, after.limiter.sampled] == [2, 20, 8]
    assert after.buffer.tree.leaves[draw.indices] == pytest.approx(np.full(8, 5.0**0.6))
    assert after.ledger.totals(())["stored"] == 2 * TRANSITIONS
    assert after.journal.replay_id == before.journal.replay_id
    after.journal.close()


def test_refusals_are_counted_exactly_once_across_a_snapshot_and_a_kill(tmp_path: Path) -> None:
    before = replay_in(tmp_path)
    for sequence in range(1, 11):
        before.refuse(SegmentRecord(7, sequence, 10 * sequence, 3, b"x", 0), "bad_checksum")
        if sequence == 5:
            before.finish(now_seconds=5.0)  # a snapshot
    before.journal.close()
    after = replay_in(tmp_path)
    assert after.ledger.totals(()) == before.ledger.totals(())
    assert after.ledger.refused == {"bad_checksum": 30}
    assert (after.ledger.sequence(7), after.environment_steps) == (10, 100)
    after.journal.close()


def test_replay_without_a_journal_starts_empty(tmp_path: Path) -> None:
    before = replay_in(tmp_path, journal=False)
    store(before, 1)
    before.finish(now_seconds=0.0)
    before.journal.close()
    assert replay_in(tmp_path, journal=False).buffer.size_segments == 0
    assert not list(tmp_path.iterdir())
