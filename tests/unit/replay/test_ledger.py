"""The ledger: counters of transitions and steps, and the positions of actors, across restarts."""

from __future__ import annotations

from pathlib import Path

from apex_jax.replay.ledger import Ledger
from apex_jax.transport.messages import ActorStatus, SegmentAck
from tests.fuzz.targets import fuzz_config
from tests.rigs.links import TRANSITIONS
from tests.rigs.served import Served, segment


def test_stored_and_refused_transitions_are_counted() -> None:
    book = Ledger()
    book.report(1, 100, is_late=False)
    book.store(1, 1, 30, 30)
    book.refuse(1, 2, 40, 10, "bad_frames")
    assert book.totals() == {"produced": 100, "stored": 30, "dropped_bad_frames": 10}
    assert (book.sequence(1), book.sequence(2)) == (2, 0)


def test_counts_never_decrease_and_an_outdated_report_changes_nothing() -> None:
    book = Ledger()
    book.store(1, 3, 90, 90)
    book.report(2, 0, is_late=False)
    assert book.steps == 0, "a lost replay has counted those before"
    for produced in (190, 140):
        book.report(1, produced, is_late=True)
        assert book.steps == 100
    book.store(1, 2, 100, 30)
    assert book.sequence(1) == 3


def test_steps_that_a_lost_replay_has_counted_are_not_counted_again() -> None:
    reported, sent = Ledger(), Ledger()
    for produced in (1_000, 1_030):
        reported.report(1, produced, is_late=True)
        sent.store(1, produced, produced, 30)
    sent.store(2, 1, 40, 40)
    assert (reported.steps, sent.steps) == (30, 30 + 40)
    again = Ledger.of(sent.actors(), **sent.counters())
    again.store(1, 1_031, 1_035, 5)
    assert (again.steps, again.sequence(1), again.sequence(2)) == (75, 1_031, 1)


# The whole link ---------------------------------------------------------------------------------------------------


def test_a_killed_actor_is_counted_up_to_its_last_segment_or_report(tmp_path: Path) -> None:
    served = Served(fuzz_config(tmp_path))
    actor = served.actor(1)
    actor.send(segment(1, 1, produced=TRANSITIONS + 7))
    actor.receive(SegmentAck)
    assert served.server.replay.ledger.totals() == {"produced": TRANSITIONS + 7, "stored": TRANSITIONS}
    actor.send(ActorStatus(0.0, 0, produced=TRANSITIONS + 9))
    served.until(lambda: served.server.replay.ledger.steps == TRANSITIONS + 9)
    served.restart()
    assert served.server.replay.ledger.steps == TRANSITIONS + 7, "the last report was in the memory of the server"
    served.close()
