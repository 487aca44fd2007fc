"""Clients get the learner's newest weights across its restarts; it knows who has the final ones, whatever the line."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
import zmq

from apex_jax.host.errors import RunError
from apex_jax.links import server as link_server
from apex_jax.links import weights_client, weights_server
from apex_jax.run.identity import RunIdentity
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    NO_RETURN,
    Goodbye,
    Refusal,
    WeightsBody,
    WeightsHeartbeat,
    WeightsHello,
    WeightsOffer,
    WeightsRequest,
)
from apex_jax.transport.params_codec import architecture_of, encode_weights
from tests.rigs.agents import assert_equal_bits
from tests.rigs.links import DEADLINE_SECONDS, wait_until
from tests.rigs.weights_link import (
    ARCHITECTURE,
    COMPATIBILITY_KEY,
    PEER_ID,
    Link,
    large_params,
    link,
    newest,
    params_of,
)

__all__ = ["link"]


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
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got.params)), "already on the device"
    assert (got.environment_steps, got.final, got.version) == (70, False, server.version)
    assert got.version > 5
    assert before <= got.published_seconds <= time.monotonic()
    assert not client.dropped


def test_the_best_return_of_all_evaluators_reaches_the_learner(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_client, "HEARTBEAT_SECONDS", 0.05)
    server, first, second, actor = link.server(), link.client(), link.client(), link.client()
    wait_until(lambda: len(server.clients) == 3)
    assert server.best_return == actor.best_return == NO_RETURN
    first.best_return = -3.5
    wait_until(lambda: server.best_return == -3.5)
    second.best_return = 7.25
    wait_until(lambda: server.best_return == 7.25)
    restarted = link.restarted_server(server)
    wait_until(lambda: restarted.best_return == 7.25)


@pytest.mark.parametrize("num_bytes", [4, 13_200_000])
def test_weights_of_any_length_arrive_in_one_message(link: Link, sent: Counter[type], num_bytes: int) -> None:
    params = {"kernel": np.random.default_rng(0).normal(size=num_bytes // 4).astype(np.float32)}
    server, client = link.server(params=params), link.client(params)
    server.publish(params, 1, 0)
    assert_equal_bits(newest(client, 1).params, params)
    assert sent[WeightsBody] == 1


def test_fault_17_late_client_has_the_last_weights_within_2_s_and_their_age_since_publishing(link: Link) -> None:
    server = link.server()
    before = time.monotonic()
    server.publish(params_of(3), 3, 0)
    after = time.monotonic()
    wait_until(lambda: time.monotonic() > after + 0.1)
    late = link.client().fetch_after(None, 2.0)
    assert late is not None
    assert_equal_bits(late.params, params_of(3))
    assert before <= late.published_seconds < after + 0.1


def test_versions_grow_even_if_the_clock_was_set_back(link: Link) -> None:
    server = link.server(first_version=2**60)
    server.publish(params_of(1), 1, 0)
    assert newest(link.client(), 1).version == 2**60 + 1


def test_fetch_ends_with_the_first_weights_or_at_its_timeout(link: Link) -> None:
    client = link.client()
    assert client.fetch_after(None) is None
    link.server().publish(params_of(1), 1, 0)
    first = client.fetch_after(None, DEADLINE_SECONDS)
    assert first is not None
    assert first.updates == 1
    assert client.fetch_after(first, 0.01) is None


def test_transfer_interrupted_by_a_restart_of_the_learner_starts_again(link: Link) -> None:
    learner = link.false_learner()
    client = link.client(large_params(0))
    learner.receive(WeightsHello)
    learner.send(WeightsOffer(9, 1, False))
    learner.receive(WeightsRequest)
    learner.close()
    server = link.when_free(lambda: link.server(params=large_params(0)))
    server.publish(large_params(2), 2, 0)
    assert_equal_bits(newest(client, 2).params, large_params(2))


def test_client_with_final_weights_takes_those_of_a_learner_that_continues_the_run(link: Link) -> None:
    server, client = link.server(), link.client()
    server.publish(params_of(1), 1, 0, final=True)
    newest(client, 1)
    again = link.restarted_server(server)  # with a higher limit
    wait_until(lambda: len(again.clients) == 1)
    again.publish(params_of(2), 2, 0)
    assert not newest(client, 2).final
    again.close()
    wait_until(lambda: client.peer_state == "lost")
    assert client._connection.disconnects == 1, "this learner was not expected to end"


@pytest.mark.parametrize(("key", "run", "words"), [
    (COMPATIBILITY_KEY.replace("task=", "task=Other"), "a" * 16,
     "environment.task: the learner Pong-v5, this process OtherPong-v5; make them equal"),
    (COMPATIBILITY_KEY, "b" * 16, f"this process is of run {'b' * 16}, the learner of run {'a' * 16}"),
], ids=["configuration", "run"])  # fmt: skip
def test_a_client_of_another_configuration_or_run_is_refused_for_good_with_both_values(
    link: Link, key: str, run: str, words: str
) -> None:
    learners, its = RunIdentity(), RunIdentity()
    learners.name, its.name = "a" * 16, run
    server, client = link.server(run=learners), link.client(compatibility_key=key, run=its)
    with pytest.raises(RunError, match=f"^refused by the learner at {link.address}: {words}"):
        wait_until(lambda: client.newest)
    assert client.peer_state == "refused"
    assert not server.clients


def test_only_the_first_the_requested_and_the_final_version_are_fetched(link: Link) -> None:
    server, eager, client = link.server(), link.client(), link.client()
    server.publish(params_of(1), 1, 0)
    newest(client, 1)
    for updates in (2, 3):
        server.publish(params_of(updates), updates, 0)
        newest(eager, updates)
    assert newest(client, 1).updates == 1
    third = client.fetch_after(client.newest, DEADLINE_SECONDS)
    assert third is not None
    assert third.updates == 3, "the newest"
    server.publish(params_of(4), 4, 0)
    newest(eager, 4)
    assert newest(client, 3).updates == 3
    server.publish(params_of(5), 5, 0, final=True)
    wait_until(lambda: client.newest is not None and client.newest.final)


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
    wait_until(lambda: sent[WeightsHeartbeat] > heartbeats + 9)
    assert sent[WeightsBody] == sent[WeightsRequest] == 3


def test_version_is_encoded_once_on_the_first_request(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = Counter[float]()

    def counted(params: Any) -> bytes:
        encoded[float(params["kernel"][0])] += 1
        return encode_weights(params)

    monkeypatch.setattr(weights_server, "encode_weights", counted)
    server = link.server(params=large_params(0))
    for updates in (1, 2):
        server.publish(large_params(updates), updates, 0)
    for client in [link.client(large_params(0)) for _ in range(5)]:
        newest(client, 2)
    assert encoded == {2.0: 1}


# The end of a run ------------------------------------------------------------------------------------------------


@pytest.fixture
def soon_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LONGEST_RECONNECT_MILLISECONDS", 50)  # for which a server waits before it is drained


@pytest.mark.usefixtures("soon_drained")
def test_server_knows_when_every_client_has_the_final_weights(link: Link) -> None:
    server, client = link.server(), link.client()
    server.publish(params_of(1), 1, 0)
    newest(client, 1)
    by_hand = link.joined_peer()
    server.publish(params_of(2), 2, 0, final=True)
    assert newest(client, 2).final
    assert not server.is_drained
    assert by_hand.receive(WeightsOffer).final
    by_hand.send(WeightsHeartbeat(PEER_ID, server.version))
    wait_until(lambda: server.is_drained)


@pytest.mark.usefixtures("soon_drained")
@pytest.mark.parametrize("leaves", [True, False], ids=["that leaves", "that dies"])
def test_learner_does_not_wait_for_a_client(link: Link, monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    monkeypatch.setattr(link_server, "PEER_TIMEOUT_SECONDS", 30.0 if leaves else 0.5)
    server, by_hand = link.server(), link.joined_peer()
    server.publish(params_of(2), 2, 0, final=True)
    if leaves:
        by_hand.send(Goodbye())
    wait_until(lambda: server.is_drained and not server.clients)


# Who is served, and who is not ------------------------------------------------------------------------------------


def test_request_before_the_first_version_is_answered_once_there_is_one(link: Link) -> None:
    server, peer = link.server(), link.joined_peer()
    peer.send(WeightsRequest())
    wait_until(lambda: any(client.is_waiting for client in server.clients.values()))
    server.publish(params_of(1), 1, 0)
    peer.receive(WeightsOffer)
    peer.send(WeightsHeartbeat(0, 0))
    peer.receive(WeightsOffer)
    assert peer.receive(WeightsBody).version == server.version


def test_client_that_does_not_read_occupies_only_its_queue(link: Link) -> None:
    server = link.server(params=large_params(0))
    greedy = link.joined_peer(architecture_of(large_params(0)))
    greedy.socket.set(zmq.SNDHWM, 0)
    server.publish(large_params(1), 1, 0)
    greedy.send(*[WeightsRequest()] * 2_000)
    client = link.client(large_params(0))
    newest(client, 1)
    wait_until(lambda: not server._socket.poll(0))
    count = 0
    while greedy.socket.poll(100):
        message = sockets.receive(greedy.socket, (WeightsBody, WeightsOffer))
        count += isinstance(message, WeightsBody)
    assert count < 1_000


def test_hello_of_a_second_kind_is_refused_in_place(link: Link) -> None:
    server, peer = link.server(), link.joined_peer()
    peer.send(WeightsHello(COMPATIBILITY_KEY, "another"))
    assert peer.receive(Refusal).final
    assert len(server.clients) == 1
    peer.send(WeightsHello(COMPATIBILITY_KEY, ARCHITECTURE))
    peer.receive(WeightsOffer)
    assert len(server.clients) == 1


def test_client_beyond_the_limit_is_refused_and_retries(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_server, "MAX_CLIENTS", 1)
    monkeypatch.setattr(weights_client, "HEARTBEAT_SECONDS", 0.05)
    server, first = link.server(), link.joined_peer()
    server.publish(params_of(1), 1, 0)
    second = link.client()
    wait_until(lambda: second.dropped["refused"] >= 2)
    first.send(Goodbye())
    newest(second, 1)
