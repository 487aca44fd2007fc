"""The ledger: what became of every transition, whatever dies meanwhile."""

from __future__ import annotations

from pathlib import Path

from apex_jax.replay.ledger import ActorCounts, Ledger
from apex_jax.transport.messages import ActorStatus, SegmentAck
from tests.fuzz.targets import fuzz_config
from tests.rigs.links import TRANSITIONS
from tests.rigs.served import Served, segment


def adds_up(totals: dict[str, int]) -> bool:
    outcomes = {name: number for name, number in totals.items() if name != "produced"}
    return totals["produced"] == sum(outcomes.values()) and min(totals.values()) >= 0


def counts_of(**counts: int) -> ActorCounts:
    return ActorCounts(0, 0, 0, 0, 0)._replace(**counts)


def test_transitions_of_a_live_actor_are_in_flight_and_those_of_a_dead_one_are_lost() -> None:
    book = Ledger()
    book.report(1, counts_of(produced=100, acknowledged=20, overflow=5, unencodable=3, unsent=2))
    book.store(1, 1, 30, 30)
    book.refuse(1, 2, 40, 10, "bad_frames")
    alive, dead = book.totals({1}), book.totals(())
    assert alive == {
        "produced": 100, "stored": 30, "in_flight": 50, "lost_with_actor": 0, "lost_with_replay": 0,
        "dropped_overflow": 5, "dropped_unencodable": 3, "dropped_unsent": 2, "dropped_bad_frames": 10,
    }  # fmt: skip
    assert dead == {**alive, "in_flight": 0, "lost_with_actor": 50}
    assert adds_up(alive)
    assert adds_up(dead)


def test_acknowledged_transitions_unknown_to_the_server_are_lost_with_the_replay() -> None:
    book = Ledger()
    book.report(1, counts_of(produced=100, acknowledged=70))
    book.store(1, 9, 30, 30)
    totals = book.totals({1})
    assert (totals["lost_with_replay"], totals["in_flight"], totals["stored"]) == (40, 30, 30)
    assert adds_up(totals)


def test_counts_never_decrease_and_an_outdated_report_changes_nothing() -> None:
    book = Ledger()
    book.store(1, 3, 90, 90)
    assert book.totals({1})["produced"] == 90
    for produced in (100, 50):
        book.report(1, counts_of(produced=produced))
        assert book.totals({1})["produced"] == 100


def test_steps_that_a_lost_replay_has_counted_are_not_counted_again() -> None:
    reported, sent = Ledger(), Ledger()
    for produced in (1_000, 1_030):
        reported.report(1, counts_of(produced=produced, acknowledged=900))
        sent.store(1, produced, produced, 30)
    sent.store(2, 1, 40, 40)
    assert (reported.steps, sent.steps) == (30, 30 + 40)
    assert Ledger.from_array(sent.to_array(), sent.refused, 0).steps == 70


# The whole link ---------------------------------------------------------------------------------------------------


def test_a_killed_actor_is_counted_up_to_its_last_segment_or_report_even_if_the_server_dies_too(tmp_path: Path) -> None:
    served = Served(fuzz_config(tmp_path))
    actor = served.actor(1)
    actor.send(segment(1, 1, produced=TRANSITIONS + 7))
    actor.receive(SegmentAck)
    assert (served.server.experience.totals()["stored"], served.server.experience.totals()["in_flight"]) == (
        TRANSITIONS,
        7,
    )
    actor.send(ActorStatus(0.0, 0, produced=TRANSITIONS + 9))
    served.until(lambda: served.server.experience.totals()["in_flight"] == 9)
    served.restart()
    totals = served.server.experience.totals()
    assert (totals["produced"], totals["stored"], totals["lost_with_actor"]) == (TRANSITIONS + 9, TRANSITIONS, 9)
    served.close()
