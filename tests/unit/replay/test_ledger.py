"""The ledger: what became of every transition, whatever dies meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

from apex_jax.config import ReplayConfig
from apex_jax.replay import ledger
from apex_jax.replay.ledger import ActorCounts, Ledger
from apex_jax.transport.messages import ActorHello, ActorStatus, Goodbye, SegmentAck
from tests.fuzz.targets import fuzz_config
from tests.rigs.links import SPEC, TRANSITIONS, CountingStream, segment_of, waiting_in
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
    alive, dead = book.totals({1}, {}), book.totals((), {})
    assert alive == {
        "produced": 100, "stored": 30, "in_flight": 50, "lost_with_actor": 0, "lost_with_replay": 0,
        "dropped_overflow": 5, "dropped_unencodable": 3, "dropped_unsent": 2, "dropped_bad_frames": 10,
    }  # fmt: skip
    assert dead == {**alive, "in_flight": 0, "lost_with_actor": 50}
    late = book.totals((), {1: 20})
    assert late == {**alive, "in_flight": 20, "lost_with_actor": 30}
    assert all(map(adds_up, (alive, dead, late)))


def test_acknowledged_transitions_unknown_to_the_server_are_lost_with_the_replay() -> None:
    book = Ledger()
    book.report(1, counts_of(produced=100, acknowledged=70))
    book.store(1, 9, 30, 30)
    totals = book.totals({1}, {})
    assert (totals["lost_with_replay"], totals["in_flight"], totals["stored"]) == (40, 30, 30)
    assert adds_up(totals)


def test_counts_never_decrease_and_an_outdated_report_changes_nothing() -> None:
    book = Ledger()
    book.store(1, 3, 90, 90)
    assert book.totals({1}, {})["produced"] == 90
    for produced in (100, 50):
        book.report(1, counts_of(produced=produced))
        assert book.totals({1}, {})["produced"] == 100


def test_steps_that_a_lost_replay_has_counted_are_not_counted_again() -> None:
    reported, sent = Ledger(), Ledger()
    for produced in (1_000, 1_030):
        reported.report(1, counts_of(produced=produced, acknowledged=900))
        sent.store(1, produced, produced, 30)
    sent.store(2, 1, 40, 40)
    assert (reported.steps, sent.steps) == (30, 30 + 40)
    assert Ledger.from_array(sent.to_array(), sent.refused, sent.forgotten).steps == 70


def test_evicted_accounts_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "REMEMBERED_RUNS", 3)
    book = Ledger()
    for peer_id in range(1, 11):
        book.store(peer_id, 1, 10, 10)
        book.report(peer_id, counts_of(produced=15, unsent=1))
        book.counts(1)  # is heard of all the time
    totals = book.totals({1}, {})
    assert len(book.to_array()) == 3
    assert book.steps == 150
    assert (totals["produced"], totals["stored"], totals["in_flight"]) == (150, 100, 4)
    assert (totals["lost_with_actor"], totals["dropped_unsent"]) == (36, 10)
    again = Ledger.from_array(book.to_array(), book.refused, book.forgotten)
    assert again.totals({1}, {}) == totals
    assert again.steps == 150
    assert again.to_array().tolist() == book.to_array().tolist()


def test_empty_account_is_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "REMEMBERED_RUNS", 3)
    book = Ledger()
    book.store(1, 1, 10, 10)
    book.refuse(2, 1, 0, 0, "bad_length")
    book.counts(3)
    for peer_id in (4, 5):
        book.store(peer_id, 1, 10, 10)
        assert len(book.to_array()) == 3
    assert book.to_array()[:, 0].tolist() == [1, 4, 5]
    assert not +book.forgotten


@pytest.mark.parametrize("is_restarted", [False, True])
def test_peers_that_only_send_a_hello_evict_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    monkeypatch.setattr(ledger, "REMEMBERED_RUNS", 3)
    served = Served(fuzz_config(tmp_path))
    actor, produced = served.actor(1), TRANSITIONS + 7
    actor.send(segment(1, 1, produced=produced))
    assert actor.receive(SegmentAck).sequence == 1
    actor.send(Goodbye(1))
    for peer_id in range(2, 6):
        peer = served.actor(peer_id)
        peer.send(ActorStatus(peer_id, 0.0, 0), Goodbye(peer_id))
    served.until(lambda: not served.server.experience.actors)
    if is_restarted:
        served.restart()
    back = served.actor(1, acknowledged=1)
    back.send(ActorStatus(1, 0.0, 0, produced=produced, acknowledged=TRANSITIONS))
    back.receive(SegmentAck)
    totals = served.server.ledger()
    assert (totals["produced"], totals["stored"], totals["in_flight"]) == (produced, TRANSITIONS, 7)
    served.close()


# The whole link ---------------------------------------------------------------------------------------------------


def test_a_killed_actor_is_counted_up_to_its_last_segment_or_report_even_if_the_server_dies_too(tmp_path: Path) -> None:
    served = Served(fuzz_config(tmp_path))
    actor = served.actor(1)
    actor.send(segment(1, 1, produced=TRANSITIONS + 7))
    actor.receive(SegmentAck)
    assert (served.server.ledger()["stored"], served.server.ledger()["in_flight"]) == (TRANSITIONS, 7)
    actor.send(ActorStatus(1, 0.0, 0, produced=TRANSITIONS + 9))
    served.until(lambda: served.server.ledger()["in_flight"] == 9)
    served.restart()
    totals = served.server.ledger()
    assert (totals["produced"], totals["stored"], totals["lost_with_actor"]) == (TRANSITIONS + 9, TRANSITIONS, 9)
    served.close()


@pytest.mark.parametrize("has_just_rejoined", [False, True])
def test_unsent_transitions_of_a_leaving_actor_are_counted_as_dropped(tmp_path: Path, has_just_rejoined: bool) -> None:
    replay = ReplayConfig(
        capacity_transitions=8 * TRANSITIONS,
        min_size_to_sample=2 * TRANSITIONS,
        samples_per_insert=1.0,
        error_buffer=8.0,
    )
    served = Served(fuzz_config(tmp_path).replace(replay=replay))
    hello = ActorHello(5, served.config.compatibility_key, 2)
    context = zmq.Context()
    stream = CountingStream(context, served.config.addresses.experience[0], SPEC, hello, 3)
    served.until(lambda: stream.wait_for_welcome(0))
    held = served.config.actor.max_outstanding_segments  # by the server, when the limiter lets in no more

    def is_stuck() -> bool:
        stream.put(segment_of(0), 0.0)
        return waiting_in(served.server.experience) == held and stream._segments.full()

    served.until(is_stuck)
    stream.produced += TRANSITIONS
    leave = stream._leave

    def leave_before_sending_again(socket: zmq.Socket) -> None:
        stream._outbox.on_new_connection()
        leave(socket)

    if has_just_rejoined:
        stream._leave = leave_before_sending_again  # type: ignore[method-assign]
    thread = threading.Thread(target=stream.close)
    thread.start()
    served.until(lambda: not thread.is_alive() and not served.server.experience.actors)
    totals = served.server.ledger()
    assert adds_up(totals)
    assert totals["dropped_unsent"] == 4 * TRANSITIONS
    assert totals["in_flight"] == held * TRANSITIONS, "they will be stored"
    assert totals["lost_with_actor"] == 0
    context.term()
    served.close()
