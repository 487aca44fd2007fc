"""Faults of the weights link: slow, late, damaged, foreign and unreachable peers."""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from apex_jax.errors import RunError
from apex_jax.links import weights
from apex_jax.links.weights import WeightsSubscriber
from apex_jax.transport import sockets, wire
from apex_jax.transport.messages import WeightsMessage
from tests.links import wait_until
from tests.proxy import Proxy
from tests.weights_link import AGREEMENT, Link, assert_equal_bits, message_of, newest, params_of


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.close()


def test_fault_16_a_subscriber_that_never_reads_slows_nobody_and_jumps_to_the_newest(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(updates: int) -> dict[str, np.ndarray]:
        return {"kernel": np.full(2**18, updates, np.float32)}

    publisher, well = link.publisher(), link.subscriber(large(0))
    hand_over, handed_over = publisher._socket.send_multipart, Counter[tuple[int, bool]]()

    def recorded(frames: Any, flags: int = 0, **more: Any) -> Any:
        is_taken = False
        try:
            result, is_taken = hand_over(frames, flags, **more), True
        finally:
            handed_over[flags, is_taken] += 1
        return result

    monkeypatch.setattr(publisher._socket, "send_multipart", recorded)
    resumed, taken = threading.Event(), list[int]()
    take = WeightsSubscriber._take

    def take_when_resumed(subscriber: WeightsSubscriber, message: WeightsMessage) -> None:
        if subscriber is not well:
            assert resumed.wait(20)
            taken.append(message.updates)
        take(subscriber, message)

    monkeypatch.setattr(WeightsSubscriber, "_take", take_when_resumed)
    slow = link.subscriber(large(0))
    for updates in range(1, 40):
        publisher.publish(large(updates), updates, 0)
        newest(well, updates)
    assert slow.newest is None
    resumed.set()
    wait_until(
        lambda: slow.newest is not None and slow.newest.updates >= 40,
        meanwhile=lambda: publisher.publish(large(40), 40, 0),
    )
    assert len(taken) < 12, "what it missed was dropped, not queued"
    assert handed_over.keys() == {(zmq.NOBLOCK, True)}, "ZMQ is never waited for, and takes each message at once"
    assert handed_over.total() >= 40


def test_fault_17_who_joins_after_the_last_update_has_its_weights_within_2_s(link: Link) -> None:
    publisher, early = link.publisher(), link.subscriber()
    publisher.publish(params_of(3), 3, 0)
    newest(early, 3)
    for _ in range(3):
        late = link.subscriber().wait(2.0)
        assert late is not None
        assert_equal_bits(late.params, params_of(3))


def test_fault_18_weights_with_a_flipped_bit_are_counted_and_the_old_ones_kept(link: Link) -> None:
    publisher, subscriber = link.false_publisher(), link.subscriber()
    wait_until(lambda: publisher.poll(0))
    sockets.send(publisher, message_of(version=1, seed=1))
    kept = newest(subscriber, 1)
    body = message_of(version=2, seed=2).body
    for place in range(0, len(body), 7):
        flipped = bytearray(body)
        flipped[place] ^= 1 << place % 8
        send_until_dropped(publisher, message_of(version=2, seed=2)._replace(body=bytes(flipped)), subscriber)
    assert set(subscriber.dropped) == {"bad_checksum"}
    assert subscriber.newest is kept
    sockets.send(publisher, message_of(version=2, seed=2))
    assert_equal_bits(newest(subscriber, 2).params, params_of(2))


def send_until_dropped(publisher: zmq.Socket, message: WeightsMessage, subscriber: WeightsSubscriber) -> None:
    """Sends a message, again if ZMQ loses it, until the subscriber has counted one more that it refused."""
    before = sum(subscriber.dropped.copy().values())
    wait_until(
        lambda: sum(subscriber.dropped.copy().values()) > before, meanwhile=lambda: sockets.send(publisher, message)
    )


def test_fault_18_a_message_with_any_bit_flipped_ends_no_subscriber(link: Link) -> None:
    publisher, subscriber = link.false_publisher(), link.subscriber()
    wait_until(lambda: publisher.poll(0))

    def version() -> int:
        return subscriber.newest.version if subscriber.newest is not None else 2**40

    lengths = [len(frame) for frame in wire.encode(message_of(version=2**40, seed=2))]
    places = [(number, place) for number, length in enumerate(lengths) for place in range(length)]
    for group in range(0, len(places), 4):  # a fifth message in a row of another configuration would end it
        for number, place in places[group : group + 4]:
            frames = [bytes(frame) for frame in wire.encode(message_of(version=version() + 1, seed=2))]
            frames[number] = (
                frames[number][:place] + bytes([frames[number][place] ^ 1 << place % 8]) + frames[number][place + 1 :]
            )
            publisher.send_multipart(frames)
        updates = 10**6 + group
        wait_until(
            lambda updates=updates: subscriber.newest is not None and subscriber.newest.updates == updates,  # type: ignore[misc]
            meanwhile=lambda updates=updates: sockets.send(  # type: ignore[misc]
                publisher, message_of(version=version() + 1, seed=3)._replace(updates=updates)
            ),
        )
        assert subscriber.newest is not None
        assert_equal_bits(subscriber.newest.params, params_of(3))
    assert {"bad_checksum", "another_config"} <= subscriber.dropped.keys()


@pytest.mark.parametrize(
    ("changes", "reason"), [({"architecture": "fedcba9876543210"}, "another_architecture"), ({"version": 4}, "")]
)
def test_fault_19_weights_of_another_network_or_of_an_earlier_run_of_the_learner_are_ignored(
    link: Link, changes: dict[str, Any], reason: str
) -> None:
    publisher, subscriber = link.false_publisher(), link.subscriber()
    wait_until(lambda: publisher.poll(0))
    sockets.send(publisher, message_of(version=5, seed=5))
    kept = newest(subscriber, 5)
    other = message_of(version=9, seed=6)._replace(learner_run_id=2, **changes)
    if reason:
        send_until_dropped(publisher, other, subscriber)
    sockets.send(publisher, other)
    send_until_dropped(publisher, message_of(version=8, seed=7, crc=1), subscriber)  # by then it has come, too
    assert subscriber.newest is kept
    assert set(subscriber.dropped) == {"bad_checksum", reason} - {""}


def test_fault_19_a_learner_of_another_game_ends_its_subscribers_in_one_line_with_both_values(link: Link) -> None:
    publisher, subscriber = link.false_publisher(), link.subscriber()
    wait_until(lambda: publisher.poll(0))
    other, versions, refused = AGREEMENT.replace("task=", "task=Other"), itertools.count(1), subscriber.dropped

    def send_another() -> None:
        sockets.send(publisher, message_of(version=next(versions), agreement=other))

    for number in (1, 2):  # four in a row are no reason yet, and what is of this run begins the count anew
        for count in range(4 * number - 3, 4 * number + 1):
            send_another()
            wait_until(lambda count=count: refused["another_config"] == count)  # type: ignore[misc]
        sockets.send(publisher, message_of(version=next(versions), seed=number))
        newest(subscriber, number)
    differs = "environment.task: there OtherPong-v5, here Pong-v5"
    said = f"the learner at {link.address} has other settings: {differs}; make them equal"
    with pytest.raises(RunError, match=f"^{re.escape(said)}$"):
        wait_until(lambda: subscriber.newest is None, meanwhile=send_another)
    assert refused["another_config"] == 12, "the fifth ended it"


def test_fault_30_a_learner_of_another_release_ends_its_subscribers_in_one_line_with_both_versions(link: Link) -> None:
    publisher, subscriber = link.false_publisher(), link.subscriber()
    wait_until(lambda: publisher.poll(0))
    foreign = wire._encode(message_of(version=1), wire.PROTOCOL_VERSION + 1)
    for updates in (1, 2):  # four in a row are no reason yet, and what is understood begins the count anew
        for number in range(4 * updates - 3, 4 * updates + 1):
            publisher.send_multipart(foreign)
            wait_until(lambda number=number: subscriber.dropped["wrong_version"] == number)  # type: ignore[misc]
        sockets.send(publisher, message_of(version=updates, seed=updates))
        newest(subscriber, updates)
    versions = f"version {wire.PROTOCOL_VERSION + 1}, this process version {wire.PROTOCOL_VERSION}"
    with pytest.raises(
        RunError, match=rf"^the learner at {link.address} cannot be understood: .* {versions}: run the same release"
    ):
        wait_until(lambda: subscriber.newest is None, meanwhile=lambda: publisher.send_multipart(foreign))
    assert subscriber.peer_state == "refused"


def test_fault_06_a_new_learner_whose_clock_is_behind_is_followed_once_the_one_before_is_silent(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PEER_TIMEOUT_SECONDS", 0.5)
    publisher, subscriber = link.false_publisher(), link.subscriber()
    wait_until(lambda: publisher.poll(0))
    sockets.send(publisher, message_of(version=2**40, seed=5))
    kept = newest(subscriber, 5)
    late = message_of(version=7, seed=6)._replace(learner_run_id=2)
    for _ in range(3):
        sockets.send(publisher, late)
        send_until_dropped(publisher, message_of(version=2**41, seed=7, crc=1), subscriber)  # by then it has come, too
        assert subscriber.newest is kept, "the one before still speaks"
    wait_until(
        lambda: subscriber.newest is not None and subscriber.newest.updates == 6,
        meanwhile=lambda: sockets.send(publisher, late),
    )


@pytest.mark.parametrize("fault", ["stop", "lose"])
def test_fault_33_a_learner_that_cannot_be_reached_is_said_once_and_found_again(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    monkeypatch.setattr(weights, "ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(weights, "PEER_TIMEOUT_SECONDS", 2.0)
    caplog.set_level(logging.INFO)
    publisher = link.publisher()
    with Proxy(link.address) as proxy:
        link.address = proxy.address
        subscriber = link.subscriber()
        publisher.publish(params_of(1), 1, 0)
        newest(subscriber, 1)
        connections = proxy.traffic.connections
        getattr(proxy, fault)()
        publisher.publish(params_of(2), 2, 0)
        wait_until(lambda: proxy.traffic.connections > connections)
        if fault == "stop":  # behind the other the next connection is a good one
            assert subscriber.peer_state == "lost"
        proxy.heal()
        newest(subscriber, 2)
        assert subscriber.peer_state == "joined"
        said = [record.getMessage() for record in caplog.records if record.name == weights.__name__]
        assert [re.sub(r"\d+ s\b", "N s", text) for text in said] == [
            f"the learner at {proxy.address} has been silent for N s: looking for it",
            "the learner is back after N s",
        ]
        subscriber.close()
