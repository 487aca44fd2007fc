"""The journal: what was acknowledged is there after a kill, once, whatever the disk does meanwhile."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apex_jax.replay import snapshots
from apex_jax.replay.file_heads import JournalError
from apex_jax.replay.journal import FIRST_REFUSAL
from apex_jax.replay.ledger import REFUSALS, ActorCounts
from apex_jax.replay.saved_state import pack_state
from tests.journals import RUN, World, config_of, files, first_leaves
from tests.links import CONFIG, TRANSITIONS

# Starting again ---------------------------------------------------------------------------------------------------


def test_a_run_without_a_journal_starts_empty_and_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = World(tmp_path)
    assert (world.numbers(), world.counters.environment_steps, world.counters.incarnations) == ([], 0, 0)
    assert caplog.messages == []
    world.kill()


def test_after_a_stop_everything_is_as_it_was(tmp_path: Path) -> None:
    before = World(tmp_path, capacity=3)
    before.store(1, 2, 3, 4, 5, now_seconds=2.0)
    before.learn(4, 9.0)
    before.buffer.sample(2, 3, 2.0)
    before.limiter.sample(6)
    before.counters.ledger.report(RUN, ActorCounts(99, 0, 7, 0, 0))
    before.counters.ledger.refuse(RUN, 6, 3, "bad_checksum")
    before.counters = before.counters._replace(incarnations=5)
    before.stop()
    after = World(tmp_path, capacity=3)
    state = after.buffer.state(0.0)
    for name, value in before.buffer.state(0.0)._asdict().items():
        if name != "ages_seconds":
            np.testing.assert_array_equal(getattr(state, name), value, err_msg=name)
    assert (after.limiter.inserted, after.limiter.sampled) == (5 * TRANSITIONS, 6)
    assert after.counters[1:] == before.counters[1:] == (50, 5)
    assert after.counters.ledger.totals((), {}) == before.counters.ledger.totals((), {})
    for one, other in zip(before.buffer.sample(2, 4, 0.0), after.buffer.sample(2, 4, 0.0), strict=True):
        np.testing.assert_array_equal(one, other)
    after.buffer.check_valid()
    after.kill()


def test_after_a_kill_no_segment_and_no_count_is_missing(tmp_path: Path) -> None:
    before = World(tmp_path)
    before.store(1, 2)
    before.learn(2, 9.0)
    before.save()
    before.store(3)
    before.learn(3, 9.0)
    for record in ((4, 20, "bad_checksum"), (5, 0, "bad_return")):
        sequence, transitions, reason = record
        before.counters.ledger.refuse(RUN, sequence, transitions, reason)
        number = before.buffer.inserted_segments
        before.journal._log.append(FIRST_REFUSAL + REFUSALS.index(reason), number, RUN, sequence, 10, transitions)
    before.journal.on_welcome(78, 9)
    before.counters.ledger.report(78, left := ActorCounts(90, 40, 0, 0, unsent=20))
    before.journal.on_report(78, left)
    before.journal.flush(0.0)
    before.kill()
    after = World(tmp_path)
    assert after.numbers() == [1, 2, 3]
    assert after.leaves()[1] == first_leaves(1)
    assert max(after.leaves()[2]) == 9.0**0.6, "as the snapshot knows"
    assert after.leaves()[3] == first_leaves(3), "no snapshot knows of it"
    assert after.counters[1:] == (50, 9)
    assert after.counters.ledger.totals((), {}) == before.counters.ledger.totals((), {})
    assert after.counters.ledger.account(RUN).sequence == 5
    assert after.limiter.inserted == 3 * TRANSITIONS
    after.kill()


def test_restart_after_restart_adds_up(tmp_path: Path) -> None:
    for start in range(6):
        world = World(tmp_path, capacity=5)
        assert world.numbers() == list(range(1, 2 * start + 1))[-5:]
        assert world.counters.environment_steps == 20 * start
        world.store(2 * start + 1, 2 * start + 2)
        (world.stop if start % 2 else world.kill)()
    assert World(tmp_path, capacity=3).numbers() == [10, 11, 12], "the newest that fit"


def test_another_exponent_means_first_priorities_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = World(tmp_path)
    before.store(1)
    before.learn(1, 9.0)
    before.stop()
    path = files(tmp_path, "snapshot")[-1]
    saved = before.buffer.state(0.0)._replace(priority_exponent=0.7)
    facts, arrays = pack_state(9, saved, before.limiter, before.config, before.counters)
    path.unlink()
    snapshots.Snapshots(path.parent, before.journal._snapshots._identity).write(facts, arrays)
    after = World(tmp_path)
    assert after.leaves()[1] == first_leaves(1)
    assert any("priority_exponent was 0.7, is now 0.6" in message for message in caplog.messages)
    after.kill()


def test_another_ratio_begins_to_count_anew(tmp_path: Path) -> None:
    before = World(tmp_path)
    before.store(1, 2)
    before.limiter.sample(1_000)
    before.stop()
    after = World(tmp_path, config=config_of(tmp_path, samples_per_insert=2.0))
    assert (after.limiter.inserted, after.limiter.sampled) == (2 * TRANSITIONS, 0)
    after.kill()


# Whose it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["segments", "snapshot"])
def test_a_journal_of_another_configuration_is_refused_and_left_as_it_is(tmp_path: Path, kept: str) -> None:
    world = World(tmp_path)
    world.store(1)
    world.stop()
    for path in (tmp_path / "replay").glob("s*"):
        if not path.name.startswith(kept):
            path.unlink()
    before = {path.name: path.read_bytes() for path in (tmp_path / "replay").iterdir()}
    other = config_of(tmp_path).replace(environment=replace(CONFIG.environment, task="Catch-v0"))
    with pytest.raises(
        JournalError, match=r"environment.task: was Pong-v5, now Catch-v0; .*another run_directory, or move .*/replay"
    ):
        World(tmp_path, config=other)
    assert {path.name: path.read_bytes() for path in (tmp_path / "replay").iterdir()} == before


def test_a_journal_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    monkeypatch.setattr("apex_jax.replay.file_heads.FORMAT", 9)
    world.store(1)
    world.kill()
    monkeypatch.undo()
    with pytest.raises(JournalError, match="has format 9, this release reads format 2"):
        World(tmp_path)


def test_a_directory_is_for_one_server_at_a_time(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(JournalError, match="another replay server is using"):
        World(tmp_path)
    world.kill()
    World(tmp_path).kill()


def test_a_directory_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "replay").write_text("")
    with pytest.raises(JournalError, match=r"cannot hold the replay: .*set run_directory") as caught:
        World(tmp_path)
    assert str(caught.value).isprintable()
