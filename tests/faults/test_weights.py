"""Faults of the weights link: slow, late, damaged, foreign and unreachable peers."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from apex_jax.host.errors import RunError
from apex_jax.links import connection, weights_client
from apex_jax.links import server as link_server
from apex_jax.transport import wire
from apex_jax.transport.messages import Finish, WeightsHello, WeightsOffer, WeightsRequest
from apex_jax.transport.params_codec import architecture_of, encode_weights
from tests.rigs.agents import assert_equal_bits
from tests.rigs.links import wait_until
from tests.rigs.messages import speaking
from tests.rigs.proxy import Proxy
from tests.rigs.weights_link import (
    PEER_ID,
    FalseLearner,
    Link,
    body_of,
    large_params,
    link,
    newest,
    params_of,
)

__all__ = ["link"]


@pytest.fixture
def learner(link: Link) -> FalseLearner:
    return link.false_learner()


def test_fault_16_client_that_does_not_read_slows_no_other_and_continues_with_the_newest_weights(link: Link) -> None:
    server, well = link.server(params=large_params(0)), link.client(large_params(0))
    slow = link.joined_peer(architecture_of(large_params(0)))
    for updates in range(1, 40):
        server.publish(large_params(updates), updates, 0)
        slow.send(WeightsRequest())
        newest(well, updates)
    slow.socket.close(linger=0)
    assert_equal_bits(newest(link.client(large_params(0)), 39).params, large_params(39))


def test_fault_16_slow_line_carries_whole_weights_while_neither_side_takes_the_other_for_dead(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_client, "PEER_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(link_server, "PEER_TIMEOUT_SECONDS", 1.0)
    params = large_params(0, 3_000_000)
    server, well = link.server(params=params), link.client(params)
    with Proxy(link.address) as proxy:
        proxy.bytes_per_second = 1e6
        link.address = proxy.address
        slow = link.client(params)
        server.publish(large_params(1, 3_000_000), 1, 0)
        for updates in range(2, 12):
            newest(well, updates - 1)
            server.publish(large_params(updates, 3_000_000), updates, 0)
        assert slow.newest is None
        assert (first := slow.fetch_after(None, 20.0)) is not None
        assert (second := slow.fetch_after(first, 20.0)) is not None
        assert second.updates == 11, "the newest then"
        assert (slow.disconnects, proxy.accepted) == (0, 1)
        slow.close()


def test_fault_18_weights_with_a_flipped_bit_are_counted_and_requested_again(link: Link, learner: FalseLearner) -> None:
    client = link.client()
    learner.receive(WeightsHello)
    learner.gives(version=1, seed=1)
    client.fetch_after(kept := newest(client, 1))
    body = encode_weights(params_of(2))
    learner.send(WeightsOffer(PEER_ID, 2, False))
    for place in range(0, len(body), 7):
        flipped = bytearray(body)
        flipped[place] ^= 1 << place % 8
        learner.receive(WeightsRequest)
        learner.send(body_of(2, 2)._replace(body=bytes(flipped)))
        assert client.newest is kept
    learner.receive(WeightsRequest)
    learner.send(body_of(2, 2))
    assert_equal_bits(newest(client, 2).params, params_of(2))
    assert client.dropped == {"bad_checksum": len(range(0, len(body), 7))}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_fault_18_weights_that_are_not_finite_are_counted_and_the_old_ones_kept(
    link: Link, learner: FalseLearner, value: float
) -> None:
    client = link.client()
    learner.receive(WeightsHello)
    learner.gives(version=1, seed=1)
    client.fetch_after(kept := newest(client, 1))
    learner.gives(version=2, seed=2, body=encode_weights(params_of(2))[:-4] + np.float32(value).tobytes())
    wait_until(lambda: client.dropped["not_finite"] == 1)
    assert client.newest is kept
    learner.gives(version=3, seed=3)
    assert_equal_bits(newest(client, 3).params, params_of(3))


def test_fault_19_unrequested_weights_are_ignored(link: Link, learner: FalseLearner) -> None:
    client = link.client()
    learner.receive(WeightsHello)
    learner.gives(version=5, seed=5)
    client.fetch_after(kept := newest(client, 5))
    learner.send(body_of(5, 6), WeightsOffer(PEER_ID, 5, False))
    learner.gives(version=6, seed=7)
    assert newest(client, 7).version == 6
    assert_equal_bits(kept.params, params_of(5))


@pytest.mark.parametrize(("answer", "said"), [
    ([b"garbage"], "not_msgpack"),
    (Finish("over"), "unknown_kind: Finish"),
    (body_of(1, body=b"abcd"), "weights of 4 bytes, not 96"),
], ids=["garbage", "another link's", "another length"])  # fmt: skip
def test_a_learner_that_breaks_the_protocol_ends_its_clients_in_one_line(
    link: Link, learner: FalseLearner, answer: Any, said: str
) -> None:
    client = link.client()
    learner.receive(WeightsHello)
    learner.send(WeightsOffer(PEER_ID, 1, False))
    learner.receive(WeightsRequest)
    learner.send(answer)
    with pytest.raises(RunError, match=f"^the learner at {link.address} .*{said}") as caught:
        wait_until(lambda: client.newest)
    assert str(caught.value).isprintable()
    assert client.peer_state == "refused"


def test_fault_30_a_learner_of_another_release_ends_its_clients_in_one_line_with_both_versions(
    link: Link, learner: FalseLearner
) -> None:
    client = link.client()
    learner.receive(WeightsHello)
    learner.send(speaking(wire.PROTOCOL_VERSION + 1, body_of(1)))
    versions = f"version {wire.PROTOCOL_VERSION + 1}, this process version {wire.PROTOCOL_VERSION}"
    with pytest.raises(RunError, match=f"^the learner at {link.address} .* {versions}"):
        wait_until(lambda: client.newest)


def test_weights_newer_than_their_offer_are_accepted(link: Link, learner: FalseLearner) -> None:
    client = link.client()
    learner.receive(WeightsHello)
    learner.send(WeightsOffer(PEER_ID, 1, False))
    learner.receive(WeightsRequest)
    learner.send(body_of(2, 2))  # published meanwhile
    client.fetch_after(newest(client, 2))
    learner.send(WeightsOffer(PEER_ID, 3, False))
    learner.receive(WeightsRequest)
    learner.send(body_of(2, 2))  # as when as many versions are held as may be
    learner.gives(version=4, seed=4)
    newest(client, 4)


@pytest.mark.parametrize("fault", ["stop", "lose"])
def test_fault_33_unreachable_learner_is_logged_once_and_found_again(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    monkeypatch.setattr(weights_client, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(weights_client, "PEER_TIMEOUT_SECONDS", 2.0)
    caplog.set_level(logging.INFO)
    server = link.server()
    with Proxy(link.address) as proxy:
        link.address = proxy.address
        client = link.client()
        server.publish(params_of(1), 1, 0)
        newest(client, 1)
        connections = proxy.accepted
        getattr(proxy, fault)()
        server.publish(params_of(2), 2, 0)
        wait_until(lambda: proxy.accepted > connections)
        if fault == "stop":  # behind the other the next connection is a good one
            assert client.peer_state == "lost"
        proxy.heal()
        newest(client, 2)
        assert client.peer_state == "joined"
        said = [record.getMessage() for record in caplog.records if record.name == connection.__name__]
        assert [word for text in said for word in ("looking for it", "is back") if word in text] == [
            "looking for it",
            "is back",
        ]
        client.close()
