"""The ledger: what became of every transition, whatever dies meanwhile."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from apex_jax.config import AddressConfig, Config, ReplayConfig
from apex_jax.links import connection
from apex_jax.replay import experience_log, ledger
from apex_jax.replay.ledger import ActorCounts, Ledger
from apex_jax.transport.messages import ActorHello, ActorStatus, Goodbye, SegmentAck
from apex_jax.workers.replay_server import ReplayServer
from apex_jax.workers.role import RoleContext
from tests.fuzz.targets import fuzz_config
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, CountingStream, free_address, segment_of, wait_until, waiting_in
from tests.rigs.served import Served, segment


def adds_up(totals: dict[str, int]) -> bool:
    fates = {name: number for name, number in totals.items() if name != "produced"}
    return totals["produced"] == sum(fates.values()) and min(totals.values()) >= 0


def counts_of(**counts: int) -> ActorCounts:
    return ActorCounts(0, 0, 0, 0, 0)._replace(**counts)


def test_transitions_of_a_live_actor_are_in_flight_and_those_of_a_dead_one_are_lost() -> None:
    book = Ledger()
    book.report(1, counts_of(produced=100, acknowledged=20, overflow=5, unencodable=3, unsent=2))
    book.store(1, 1, 30)
    book.refuse(1, 2, 10, "bad_frames")
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
    book.store(1, 9, 30)
    totals = book.totals({1}, {})
    assert (totals["lost_with_replay"], totals["in_flight"], totals["stored"]) == (40, 30, 30)
    assert adds_up(totals)


def test_counts_never_decrease_and_an_outdated_report_changes_nothing() -> None:
    book = Ledger()
    book.store(1, 3, 90)
    assert book.totals({1}, {})["produced"] == 90
    for produced in (100, 50):
        book.report(1, counts_of(produced=produced))
        assert book.totals({1}, {})["produced"] == 100


def test_evicted_accounts_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "REMEMBERED_RUNS", 3)
    book = Ledger()
    for peer_id in range(1, 11):
        book.store(peer_id, 1, 10)
        book.report(peer_id, counts_of(produced=15, unsent=1))
        book.account(1)  # is heard of all the time
    totals = book.totals({1}, {})
    assert len(book.to_array()) == 3
    assert (totals["produced"], totals["stored"], totals["in_flight"]) == (150, 100, 4)
    assert (totals["lost_with_actor"], totals["dropped_unsent"]) == (36, 10)
    again = Ledger.from_array(book.to_array(), book.refused, book.forgotten)
    assert again.totals({1}, {}) == totals
    assert again.to_array().tolist() == book.to_array().tolist()


def test_empty_account_is_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "REMEMBERED_RUNS", 3)
    book = Ledger()
    book.store(1, 1, 10)
    book.refuse(2, 1, 0, "bad_length")
    book.hear(3, 0)
    for peer_id in (4, 5):
        book.store(peer_id, 1, 10)
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


class Fleet:
    """A server with a journal that comes and goes, and real streams of actors that do."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.context = zmq.Context()
        self.server: ReplayServer | None = None
        self.streams: dict[int, CountingStream] = {}

    def start_server(self) -> ReplayServer:
        self._server_context = zmq.Context()
        self.server = ReplayServer(RoleContext(self.config, self._server_context, "replay"), SPEC)
        return self.server

    def stop_server(self) -> None:
        assert self.server is not None
        self.server.close()
        self._server_context.term()  # the addresses are free when this returns
        self.server = None

    def start_actor(self) -> None:
        peer_id = 2**62
        hello = ActorHello(peer_id, self.config.compatibility_key, 2)
        address = self.config.addresses.experience[0]
        self.streams[peer_id] = CountingStream(self.context, address, SPEC, hello, 3)

    def serve(self) -> None:
        if self.server is not None:
            self.server.serve(0.0)

    def connected(self) -> set[int]:
        assert self.server is not None
        return {actor.peer_id for actor in self.server.experience.actors.values()}

    def remove_actor(self, dies: bool) -> None:
        peer_id, stream = self.streams.popitem()
        # One that leaves cut off would be as one that is killed, and the hello of one that is dead be a ghost's.
        wait_until(lambda: peer_id in self.connected(), self.serve)
        if dies:
            stream._leave = lambda socket: None  # type: ignore[method-assign]
        thread = threading.Thread(target=stream.close)
        thread.start()
        wait_until(lambda: not thread.is_alive(), self.serve)
        if dies and self.server is not None:
            service = self.server.experience
            for identity in [identity for identity, actor in service.actors.items() if actor.peer_id == peer_id]:
                service._remove(identity)
            self.serve()

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
        self.context.term()
        self.stop_server()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(experience_log, "FILE_BYTES", 4_000)
    return CONFIG.replace(
        run_directory=str(tmp_path),
        replay=replace(ReplayConfig(), capacity_transitions=8 * TRANSITIONS, min_size_to_sample=2 * TRANSITIONS),
        addresses=AddressConfig((free_address(),), (free_address(),), free_address()),
    )


def joined(fleet: Fleet) -> CountingStream:
    """Returns the stream of the only actor, which the server knows."""
    fleet.start_actor()
    (stream,) = fleet.streams.values()
    wait_until(lambda: stream.wait_for_welcome(0), fleet.serve)
    return stream


def test_a_killed_actor_is_counted_up_to_its_last_segment(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(config)
    server, stream = fleet.start_server(), joined(fleet)
    patience = stream._connection._patience._replace(heartbeat=1_000.0)
    monkeypatch.setattr(stream._connection, "_patience", patience)
    wait_until(
        lambda: stream._connection._next_heartbeat > time.monotonic() + 100.0, fleet.serve
    )  # no report till then
    stream.produced += 7
    assert stream.put(segment_of(0), 10, 0.0)
    wait_until(lambda: server.ledger()["stored"] == TRANSITIONS, fleet.serve)
    assert (server.ledger()["produced"], server.ledger()["in_flight"]) == (TRANSITIONS + 7, 7)
    stream.produced += 2  # of the last two nobody hears
    fleet.remove_actor(dies=True)
    assert (server.ledger()["produced"], server.ledger()["lost_with_actor"]) == (TRANSITIONS + 7, 7)
    fleet.close()


def test_an_actor_killed_together_with_the_server_is_counted_up_to_its_last_report(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(config)
    server, stream = fleet.start_server(), joined(fleet)
    assert stream.put(segment_of(0), 10, 0.0)
    wait_until(lambda: server.ledger()["stored"] == TRANSITIONS, fleet.serve)
    patience = stream._connection._patience._replace(heartbeat=1_000.0)
    monkeypatch.setattr(stream._connection, "_patience", patience)
    wait_until(lambda: stream._connection._next_heartbeat > time.monotonic() + 100.0, fleet.serve)
    stream.produced += 7
    assert stream.put(segment_of(1), 10, 0.0)
    wait_until(lambda: server.ledger()["in_flight"] == 7, fleet.serve)
    stream.produced += 2
    stream._connection.send_heartbeat()  # of these two the next report says
    wait_until(lambda: server.ledger()["in_flight"] == 9, fleet.serve)
    wait_until(lambda: all(a.written == 2 for a in server.experience.actors.values()), fleet.serve)
    fleet.serve()
    fleet.stop_server()  # without a snapshot
    (peer_id,) = fleet.streams
    fleet.streams.pop(peer_id)._leave = lambda socket: None  # type: ignore[method-assign]
    assert fleet.start_server().ledger()["lost_with_actor"] == 9
    stream.close()
    fleet.close()


@pytest.mark.parametrize("has_just_rejoined", [False, True])
def test_unsent_transitions_of_a_leaving_actor_are_counted_as_dropped(config: Config, has_just_rejoined: bool) -> None:
    tight = config.replace(replay=replace(config.replay, samples_per_insert=1.0, error_buffer=8.0))
    fleet = Fleet(tight)
    server = fleet.start_server()
    hello = ActorHello(5, tight.compatibility_key, 2)
    stream = CountingStream(fleet.context, tight.addresses.experience[0], SPEC, hello, 3)
    fleet.streams[5] = stream
    wait_until(lambda: stream.wait_for_welcome(0), fleet.serve)
    held = CONFIG.actor.max_outstanding_segments  # by the server, when the limiter lets in no more

    def is_stuck() -> bool:
        stream.put(segment_of(0), 1, 0.0)
        return waiting_in(server.experience) == held and stream._produced.full()

    wait_until(is_stuck, fleet.serve)
    stream.produced += TRANSITIONS
    leave = stream._leave

    def leave_before_sending_again(socket: zmq.Socket) -> None:
        stream._outbox.on_new_connection()
        leave(socket)

    if has_just_rejoined:
        stream._leave = leave_before_sending_again  # type: ignore[method-assign]
    fleet.remove_actor(dies=False)
    wait_until(lambda: not server.experience.actors, fleet.serve)
    totals = server.ledger()
    assert adds_up(totals)
    assert totals["dropped_unsent"] == 4 * TRANSITIONS
    assert totals["in_flight"] == held * TRANSITIONS, "they will be stored"
    assert totals["lost_with_actor"] == 0
    fleet.close()
