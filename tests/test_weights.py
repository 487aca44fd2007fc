"""Specification of the weights link: the learner's server and its clients on their threads, over real sockets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import zmq

from apex_jax.errors import RunError
from apex_jax.links import weights_client, weights_server
from apex_jax.links.weights_server import WeightsServer
from apex_jax.run_identity import RunIdentity
from apex_jax.transport import params_codec, sockets
from apex_jax.transport.messages import (
    WEIGHTS_PIECE_BYTES,
    Goodbye,
    Refusal,
    Rejoin,
    WeightsHeartbeat,
    WeightsHello,
    WeightsOffer,
    WeightsPiece,
    WeightsRequest,
)
from apex_jax.transport.params_codec import architecture_of
from tests.links import wait_until
from tests.weights_link import (
    ARCHITECTURE,
    COMPATIBILITY_KEY,
    RUN_ID,
    Link,
    assert_equal_bits,
    large_params,
    newest,
    params_of,
)


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[type]:
    """How many messages of each kind both ends have sent."""
    send, sent = sockets.send, Counter[type]()

    def counted(socket: zmq.Socket, message: Any, identity: bytes | None = None) -> bool:
        sent[type(message)] += 1
        return send(socket, message, identity)

    monkeypatch.setattr(sockets, "send", counted)
    return sent


# What arrives ----------------------------------------------------------------------------------------------------


def test_weights_arrive_bit_for_bit_with_their_counts(link: Link) -> None:
    server, client = link.server(first_version=5), link.client()
    before = time.monotonic()
    server.publish(jax.device_put(params_of(1)), updates=7, environment_steps=70)
    got = newest(client, 7)
    assert_equal_bits(got.params, params_of(1))
    assert (got.environment_steps, got.final, got.version) == (70, False, server.version)
    assert got.version > 5
    assert before <= got.published_seconds <= time.monotonic()
    assert not client.dropped


@pytest.mark.parametrize("num_bytes", [4, WEIGHTS_PIECE_BYTES, WEIGHTS_PIECE_BYTES + 4, 11 * WEIGHTS_PIECE_BYTES])
def test_weights_of_any_length_arrive_in_pieces(link: Link, sent: Counter[type], num_bytes: int) -> None:
    params = {"kernel": np.random.default_rng(0).normal(size=num_bytes // 4).astype(np.float32)}
    server, client = link.server(params=params), link.client(params)
    server.publish(params, 1, 0)
    assert_equal_bits(newest(client, 1).params, params)
    assert sent[WeightsPiece] == -(-num_bytes // WEIGHTS_PIECE_BYTES)


def test_the_newest_wins_and_versions_grow(link: Link) -> None:
    server, client = link.server(), link.client()
    server.publish(params_of(0), 0, 0)
    before = newest(client, 0)
    for updates in range(1, 50):
        server.publish(params_of(updates), updates, 0)
    after = newest(client, 49)
    assert_equal_bits(after.params, params_of(49))
    assert after.version > before.version


def test_age_counts_from_publishing_however_late_a_client_comes(link: Link) -> None:
    server = link.server()
    before = time.monotonic()
    server.publish(params_of(3), 3, 0)
    after = time.monotonic()
    wait_until(lambda: time.monotonic() > after + 0.5)
    late = newest(link.client(), 3)
    assert_equal_bits(late.params, params_of(3))
    assert before <= late.published_seconds < after + 0.5


def test_waiting_ends_with_the_first_weights_or_in_time(link: Link) -> None:
    client = link.client()
    assert client.wait(0.0) is None
    link.server().publish(params_of(1), 1, 0)
    first = client.wait(20.0)
    assert first is not None
    assert first.updates == 1


def test_versions_grow_also_over_a_clock_that_was_set_back(link: Link) -> None:
    server = link.server(first_version=2**60)
    server.publish(params_of(1), 1, 0)
    assert newest(link.client(), 1).version == 2**60 + 1


@pytest.mark.parametrize("first_version", [0, 2**60], ids=["older", "newer"])
def test_a_client_follows_the_learner_across_a_restart_whatever_its_versions(link: Link, first_version: int) -> None:
    server, client = link.server(first_version=2**50), link.client()
    server.publish(params_of(1), 900, 0)
    newest(client, 900)
    again = link.restarted_server(server, first_version)  # from an older checkpoint
    again.publish(params_of(2), 100, 0)
    after = newest(client, 100)
    assert_equal_bits(after.params, params_of(2))
    assert client.peer_state == "joined"


def test_a_transfer_that_a_restart_of_the_learner_cuts_off_begins_anew(link: Link) -> None:
    learner = link.false_learner()
    client = link.client(large_params(0))
    learner.receive(WeightsHello)
    learner.send(WeightsOffer(9, 1, False))
    learner.receive(WeightsRequest)
    body = large_params(1)["kernel"].tobytes()
    learner.send(WeightsPiece(9, 1, 1, 0, False, 0.0, 0, len(body), 0, body[:WEIGHTS_PIECE_BYTES]))
    learner.receive(WeightsRequest)
    learner.close()
    server = link.when_free(lambda: link.server(params=large_params(0)))
    server.publish(large_params(2), 2, 0)
    assert_equal_bits(newest(client, 2).params, large_params(2))


# What is sent, and what is not -----------------------------------------------------------------------------------


def test_nothing_but_heartbeats_is_sent_while_nothing_changes(
    link: Link, sent: Counter[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_client, "HEARTBEAT_SECONDS", 0.05)
    server, clients = link.server(), [link.client() for _ in range(3)]
    server.publish(params_of(1), 1, 0)
    for client in clients:
        newest(client, 1)
    heartbeats = sent[WeightsHeartbeat]
    wait_until(lambda: sent[WeightsHeartbeat] > heartbeats + 30)
    assert sent[WeightsPiece] == sent[WeightsRequest] == 3


def test_a_version_is_encoded_once_and_only_when_somebody_asks(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, encoded = params_codec.encode_weights, Counter[float]()

    def counted(params: Any) -> bytes:
        encoded[float(params["kernel"][0])] += 1
        return encode(params)

    monkeypatch.setattr(weights_server, "encode_weights", counted)
    server = link.server(params=large_params(0))
    for updates in (1, 2):
        server.publish(large_params(updates), updates, 0)
    clients = [link.client(large_params(0)) for _ in range(5)]
    for client in clients:
        newest(client, 2)
    assert encoded == {2.0: 1}


def test_a_client_that_does_not_take_every_version_takes_the_first_what_it_requests_and_the_final(link: Link) -> None:
    server, eager, client = link.server(), link.client(), link.client(takes_every=False)
    server.publish(params_of(1), 1, 0)
    newest(client, 1)
    for updates in (2, 3):
        server.publish(params_of(updates), updates, 0)
        newest(eager, updates)
    assert newest(client, 1).updates == 1
    client.request()
    newest(client, 3)
    server.publish(params_of(4), 4, 0)
    newest(eager, 4)
    assert newest(client, 3).updates == 3
    server.publish(params_of(5), 5, 0, final=True)
    assert newest(client, 5).final


def test_versions_that_nobody_is_being_sent_are_no_longer_held_as_bytes(link: Link) -> None:
    server, client = link.server(params=large_params(0)), link.client(large_params(0))
    begun = link.joined_peer(architecture_of(large_params(0)))
    for updates in range(1, 20):
        server.publish(large_params(updates), updates, 0)
        newest(client, updates)
        if updates == 3:
            begun.send(WeightsRequest(0, 0))
            wait_until(lambda: isinstance(sockets.receive(begun.socket, (WeightsOffer, WeightsPiece)), WeightsPiece))
    assert [encoded.published.updates for encoded in server._encoded.values()] == [3, 19]


def test_as_many_versions_are_held_as_bytes_as_may_be_and_the_final_one(link: Link) -> None:
    server = link.server(params=large_params(0))
    most = weights_server.MAX_ENCODED
    peers = [link.joined_peer(architecture_of(large_params(0))) for _ in range(most + 2)]

    def request(updates: int, final: bool = False) -> int:
        server.publish(large_params(updates), updates, 0, final)
        peer = peers[updates - 1]
        wait_until(lambda: peer.receive(WeightsOffer).version == server.version)
        peer.send(WeightsRequest(0, 0))
        return peer.receive(WeightsPiece).updates

    for updates in range(1, most + 1):
        assert request(updates) == updates
    assert request(most + 1) == most, "the newest of those that are held"
    assert request(most + 2, final=True) == most + 2
    assert len(server._encoded) == most


# The end of a run ------------------------------------------------------------------------------------------------


def test_the_server_knows_when_every_client_has_the_final_weights(link: Link) -> None:
    server, client = link.server(), link.client()
    server.publish(params_of(1), 1, 0)
    newest(client, 1)
    by_hand = link.joined_peer()
    server.publish(params_of(2), 2, 0, final=True)
    assert newest(client, 2).final
    assert not server.is_drained
    assert by_hand.receive(WeightsOffer).final
    by_hand.send(WeightsHeartbeat(RUN_ID, server.version))
    wait_until(lambda: server.is_drained)


@pytest.mark.parametrize("leaves", [True, False], ids=["that leaves", "that dies"])
def test_nobody_waits_for_a_client(link: Link, monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    monkeypatch.setattr(weights_server, "PEER_TIMEOUT_SECONDS", 30.0 if leaves else 0.5)
    server, by_hand = link.server(), link.joined_peer()
    server.publish(params_of(2), 2, 0, final=True)
    if leaves:
        by_hand.send(Goodbye(0))
    wait_until(lambda: server.is_drained and not server.clients)


def test_nobody_looks_for_a_learner_that_has_ended(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = link.client()
    server = link.server()
    server.publish(params_of(1), 1, 0, final=True)
    newest(client, 1)
    server.close()
    assert not client._closing.wait(1.0)
    assert client.peer_state == "joined"
    assert caplog.records == []


# Who is served ---------------------------------------------------------------------------------------------------


def test_a_client_of_another_configuration_is_refused_for_good_with_both_values(link: Link) -> None:
    server = link.server()
    client = link.client(compatibility_key=COMPATIBILITY_KEY.replace("task=", "task=Other"))
    with pytest.raises(RunError) as caught:
        wait_until(lambda: client.newest)
    differs = "environment.task: the learner Pong-v5, this process OtherPong-v5"
    assert str(caught.value) == f"refused by the learner at {link.address}: {differs}; make them equal"
    assert client.peer_state == "refused"
    assert server.dropped == {"another_config": 1}


def test_a_client_of_another_run_is_refused_for_good_with_both_names(link: Link, tmp_path: Any) -> None:
    for name in ("learner", "client"):
        (tmp_path / name).mkdir()
    (tmp_path / "learner" / "run_identity").write_text("a" * 16)
    (tmp_path / "client" / "run_identity").write_text("b" * 16)
    link.server(run=RunIdentity(str(tmp_path / "learner")))
    client = link.client(run=RunIdentity(str(tmp_path / "client")))
    with pytest.raises(RunError, match=f"this process is of run {'b' * 16}, the learner of run {'a' * 16}"):
        wait_until(lambda: client.newest)


def test_a_client_becomes_part_of_the_learners_run(link: Link, tmp_path: Any) -> None:
    run, learners = RunIdentity(str(tmp_path)), RunIdentity()
    learners.name = "c" * 16
    link.server(run=learners)
    client = link.client(run=run)
    wait_until(lambda: client.peer_state == "joined")
    assert run.name == "c" * 16
    assert (tmp_path / "run_identity").read_text() == "c" * 16


def test_a_client_of_another_network_is_refused_for_good(link: Link) -> None:
    link.server()
    client = link.client({"q": np.zeros((4, 3), np.float32)})
    with pytest.raises(RunError, match="the network here is another one than the learner's"):
        wait_until(lambda: client.newest)


def test_who_has_not_said_hello_is_asked_to(link: Link) -> None:
    link.server()
    peer = link.peer()
    for message in (WeightsHeartbeat(0, 0), WeightsRequest(0, 0), Goodbye(1)):
        peer.send(message)
        peer.receive(Rejoin)


@pytest.mark.parametrize("request_", [(0, 0), (7, 0), (0, 1), (0, WEIGHTS_PIECE_BYTES), (0, 2**29)], ids=str)
def test_what_the_learner_does_not_have_is_answered_with_what_it_has(link: Link, request_: tuple[int, int]) -> None:
    server, peer = link.server(), link.joined_peer()
    if request_ != (0, 0):
        server.publish(params_of(1), 1, 0)
        peer.receive(WeightsOffer)
    peer.send(WeightsRequest(*request_))
    assert peer.receive(WeightsOffer).version == server.version


def test_a_server_knows_its_clients_until_they_leave_or_are_silent(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_client, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(weights_server, "PEER_TIMEOUT_SECONDS", 2.0)
    server, clients = link.server(), [link.client() for _ in range(3)]
    link.joined_peer()  # which says no more
    wait_until(lambda: len(server.clients) == 4)
    clients[0].close()
    wait_until(lambda: len(server.clients) == 2)
    assert [client.peer_state for client in clients[1:]] == ["joined"] * 2


def test_a_client_too_many_is_told_so_and_tries_again(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_server, "MAX_CLIENTS", 1)
    monkeypatch.setattr(weights_client, "HEARTBEAT_SECONDS", 0.05)
    server, first = link.server(), link.joined_peer()
    server.publish(params_of(1), 1, 0)
    second = link.client()
    wait_until(lambda: second.dropped["refused"] >= 2)
    assert second.peer_state == "refused"
    first.send(Goodbye(0))
    newest(second, 1)


def test_a_client_of_large_weights_that_sends_without_reading_holds_no_more_than_its_queue(link: Link) -> None:
    server = link.server(params=large_params(0))
    greedy = link.joined_peer(architecture_of(large_params(0)))
    greedy.socket.set(zmq.SNDHWM, 0)
    server.publish(large_params(1), 1, 0)
    greedy.send(*[WeightsRequest(0, 0)] * 2_000)
    client = link.client(large_params(0))
    newest(client, 1)
    wait_until(lambda: not server._socket.poll(0))
    count = 0
    while greedy.socket.poll(500):
        message = sockets.receive(greedy.socket, (WeightsPiece, WeightsOffer))
        count += isinstance(message, WeightsPiece)
    assert count < 1_000


def test_hello_of_a_second_kind_is_refused_in_place(link: Link) -> None:
    server, peer = link.server(), link.joined_peer()
    peer.send(WeightsHello(COMPATIBILITY_KEY, "another"))
    assert peer.receive(Refusal).final
    assert len(server.clients) == 1
    peer.send(WeightsHello(COMPATIBILITY_KEY, ARCHITECTURE))
    peer.receive(WeightsOffer)
    assert len(server.clients) == 1


# Addresses and threads -------------------------------------------------------------------------------------------


def test_an_address_in_use_is_one_line_and_leaves_nothing_open(link: Link) -> None:
    link.server()
    context = zmq.Context()
    make = partial(WeightsServer, context, link.address, 2, 0, COMPATIBILITY_KEY, ARCHITECTURE)
    with pytest.raises(sockets.BindError, match=rf"addresses\.weights={link.address} cannot be served") as caught:
        make()
    assert str(caught.value).isprintable()
    context.term()
    assert context.closed


def test_a_client_without_a_learner_can_be_closed(link: Link) -> None:
    client = link.client()
    client.close()
    assert not client._thread.is_alive()
