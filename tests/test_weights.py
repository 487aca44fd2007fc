"""Specification of the weights link: publishers and subscribers on their threads, over real sockets."""

from __future__ import annotations

import logging
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq

from apex_jax.transport import sockets, wire
from apex_jax.transport.codec import encode_weights
from apex_jax.types import WeightsMessage
from apex_jax.workers import weights
from apex_jax.workers.weights import Weights, WeightsPublisher, WeightsSubscriber
from tests.links import free_address, wait_until
from tests.proxy import Proxy

PARAMS = {
    "hidden": {"kernel": np.zeros((3, 4), np.float32), "bias": np.zeros(4, np.float32)},
    "q": np.zeros((4, 2), "f4"),
}


def params_of(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), PARAMS)


def assert_equal_leaves(leaf: Any, expected: np.ndarray) -> None:
    assert isinstance(leaf, jax.Array), "already on the device"
    assert leaf.dtype == np.float32
    assert np.asarray(leaf).tobytes() == expected.tobytes()


def assert_equal_bits(params: Any, expected: Any) -> None:
    jax.tree.map(assert_equal_leaves, params, expected)  # which raises where their structures differ


class Link:
    """Builds both ends, and takes them down after the test."""

    def __init__(self) -> None:
        self.address = free_address()
        self._context = zmq.Context()
        self._ends: list[Any] = []

    def publisher(self, first_version: int = 0) -> WeightsPublisher:
        publisher = WeightsPublisher(self._context, self.address, run_id=1, first_version=first_version)
        self._ends.append(publisher)
        return publisher

    def subscriber(self, like_params: Any = PARAMS) -> WeightsSubscriber:
        subscriber = WeightsSubscriber(self._context, self.address, like_params)
        self._ends.append(subscriber)
        return subscriber

    def false_publisher(self) -> zmq.Socket:
        """The learner's end, worked by hand."""
        publisher = sockets.serve_weights(self._context, self.address)
        self._ends.append(publisher)
        return publisher

    def slow_subscriber(self) -> zmq.Socket:
        """A subscriber that reads when the test does."""
        subscriber = sockets.connect_weights(self._context, self.address)
        self._ends.append(subscriber)
        return subscriber

    def restarted_publisher(self, publisher: WeightsPublisher, first_version: int = 0) -> WeightsPublisher:
        publisher.close()
        self._ends.remove(publisher)
        made: list[WeightsPublisher] = []

        def is_made() -> bool:  # ZMQ frees the address a moment after the close
            try:
                made.append(self.publisher(first_version))
            except sockets.BindError:
                return False
            return True

        wait_until(is_made)
        return made[0]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        self._context.term()  # which waits for ever if an end is still open


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.close()


def newest(subscriber: WeightsSubscriber, updates: int) -> Weights:
    """Waits for the weights of so many updates."""
    wait_until(lambda: subscriber.newest is not None and subscriber.newest.updates == updates)
    assert subscriber.newest is not None
    return subscriber.newest


def message_of(version: int, seed: int = 0, **changes: Any) -> WeightsMessage:
    architecture, body = encode_weights(params_of(seed))
    message = WeightsMessage(1, version, seed, 0, False, architecture, zlib.crc32(body), body)
    return message._replace(**changes)


def test_what_is_published_arrives_bit_for_bit_with_all_that_was_said_of_it(link: Link) -> None:
    publisher, subscriber = link.publisher(first_version=5), link.subscriber()
    publisher.publish(jax.device_put(params_of(1)), updates=7, environment_steps=70)
    got = newest(subscriber, 7)
    assert_equal_bits(got.params, params_of(1))
    assert (got.environment_steps, got.final, got.version) == (70, False, publisher.version)
    assert got.version > 5
    assert got.received_seconds > 0
    assert not subscriber.dropped


def test_the_newest_wins_and_versions_grow(link: Link) -> None:
    publisher, subscriber = link.publisher(), link.subscriber()
    publisher.publish(params_of(0), 0, 0)
    before = newest(subscriber, 0)
    for updates in range(1, 50):
        publisher.publish(params_of(updates), updates, 0)
    after = newest(subscriber, 49)
    assert_equal_bits(after.params, params_of(49))
    assert after.version > before.version
    assert not publisher._newest, "nothing piles up"


def test_a_late_subscriber_gets_the_weights_that_were_sent_before_it_came(link: Link) -> None:
    publisher, early = link.publisher(), link.subscriber()
    publisher.publish(params_of(3), 3, 0)
    first = newest(early, 3)
    late = newest(link.subscriber(), 3)
    assert_equal_bits(late.params, params_of(3))
    assert late.version == first.version
    assert early.newest is first, "what is sent again for a newcomer is no news to the others"


def test_waiting_ends_with_the_first_weights_or_in_time(link: Link) -> None:
    subscriber = link.subscriber()
    assert subscriber.wait(0.0) is None
    link.publisher().publish(params_of(1), 1, 0)
    first = subscriber.wait(20.0)
    assert first is not None
    assert first.updates == 1


def test_the_last_weights_say_so_and_are_sent_even_if_the_learner_leaves_at_once(link: Link) -> None:
    publisher, subscriber = link.publisher(), link.subscriber()
    publisher.publish(params_of(1), 1, 0)
    assert not newest(subscriber, 1).final
    publisher.publish(params_of(2), 2, 0, final=True)
    publisher.close()
    assert newest(subscriber, 2).final


def test_the_last_weights_reach_also_a_subscriber_that_has_fallen_behind(link: Link) -> None:
    slow, publisher = link.slow_subscriber(), link.publisher()
    large = {"kernel": np.zeros(2**19, np.float32)}
    publisher.publish(large, 0, 0)
    assert slow.poll(20_000)
    for updates in range(1, 20):
        publisher.publish(large, updates, 0)
        wait_until(lambda: not publisher._newest)
    publisher.publish(large, 20, 0, final=True)
    closing = threading.Thread(target=publisher.close)
    closing.start()
    received: list[WeightsMessage] = []

    def read() -> None:
        if (message := sockets.receive(slow, (WeightsMessage,), Counter())) is not None:
            received.append(message)

    wait_until(lambda: received and received[-1].final, meanwhile=read)
    closing.join()


def test_a_subscriber_follows_the_learner_across_a_restart(link: Link) -> None:
    publisher, subscriber = link.publisher(), link.subscriber()
    publisher.publish(params_of(1), 900, 0)
    before = newest(subscriber, 900)
    again = link.restarted_publisher(publisher, first_version=0)  # from an older checkpoint
    again.publish(params_of(2), 100, 0)
    after = newest(subscriber, 100)
    assert after.version > before.version
    assert_equal_bits(after.params, params_of(2))


def test_versions_grow_also_over_a_clock_that_was_set_back(link: Link) -> None:
    publisher = link.publisher(first_version=2**60)
    publisher.publish(params_of(1), 1, 0)
    assert newest(link.subscriber(), 1).version == 2**60 + 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "fedcba9876543210"}, "another_architecture"),
        ({"crc": 1}, "bad_checksum"),
        ({"body": b"abcd", "crc": zlib.crc32(b"abcd")}, "bad_length"),
    ],
)
def test_weights_that_cannot_be_right_are_counted_and_the_old_ones_kept(
    link: Link, changes: dict[str, Any], reason: str
) -> None:
    publisher, subscriber = link.false_publisher(), link.subscriber()
    wait_until(lambda: publisher.poll(0))
    sockets.send(publisher, message_of(version=1, seed=1))
    kept = newest(subscriber, 1)
    sockets.send(publisher, message_of(version=2, seed=2, **changes))
    wait_until(lambda: subscriber.dropped[reason] == 1)
    assert subscriber.newest is kept
    sockets.send(publisher, message_of(version=3, seed=3))
    assert_equal_bits(newest(subscriber, 3).params, params_of(3))


def test_older_weights_and_garbage_are_no_news(link: Link) -> None:
    publisher, subscriber = link.false_publisher(), link.subscriber()
    wait_until(lambda: publisher.poll(0))
    sockets.send(publisher, message_of(version=5, seed=5))
    kept = newest(subscriber, 5)
    sockets.send(publisher, message_of(version=5, seed=6))
    wait_until(lambda: subscriber.dropped, meanwhile=lambda: publisher.send_multipart([b"garbage", b"more"]))
    assert set(subscriber.dropped) == {"not_msgpack"}
    assert subscriber.newest is kept


def test_a_network_of_another_shape_is_refused_by_name_of_its_digest(link: Link) -> None:
    publisher, subscriber = link.publisher(), link.subscriber({"q": jnp.zeros((4, 3))})
    publisher.publish(params_of(1), 1, 0)
    wait_until(lambda: subscriber.dropped["another_architecture"] >= 1)
    assert subscriber.newest is None


def test_an_address_in_use_is_one_line_and_leaves_nothing_open(link: Link) -> None:
    link.publisher()
    context = zmq.Context()
    with pytest.raises(sockets.BindError, match=rf"addresses\.weights={link.address} cannot be served") as caught:
        WeightsPublisher(context, link.address, run_id=2, first_version=0)
    assert str(caught.value).isprintable()
    context.term()
    assert context.closed


def test_a_subscriber_without_a_publisher_can_be_closed(link: Link) -> None:
    subscriber = link.subscriber()
    subscriber.close()
    assert not subscriber._thread.is_alive()


# Signs of life ----------------------------------------------------------------------------------------------------


def test_a_learner_without_news_is_no_silent_one(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights, "ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(weights, "PEER_TIMEOUT_SECONDS", 0.6)
    publisher, subscriber = link.publisher(), link.subscriber()
    publisher.publish(params_of(1), 1, 0)
    newest(subscriber, 1)
    assert subscriber._heard_seconds is not None
    later = subscriber._heard_seconds + 1.5
    wait_until(lambda: (subscriber._heard_seconds or 0.0) >= later)
    assert caplog.records == []


@pytest.mark.parametrize("fault", ["stop", "lose"])
def test_fault_33_a_learner_that_cannot_be_reached_is_said_once_and_found_again(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    monkeypatch.setattr(weights, "ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(weights, "PEER_TIMEOUT_SECONDS", 0.6)
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
        proxy.heal()
        newest(subscriber, 2)
        said = [record.getMessage() for record in caplog.records if record.name == weights.__name__]
        assert [text.split(" after ")[0] for text in said] == [
            f"the learner at {proxy.address} is silent for 1 s: looking for it",
            "the learner is back",
        ]
        subscriber.close()


def test_nobody_looks_for_a_learner_that_has_ended(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights, "PEER_TIMEOUT_SECONDS", 0.3)
    subscriber = link.subscriber()
    publisher = link.publisher()
    publisher.publish(params_of(1), 1, 0, final=True)
    newest(subscriber, 1)
    publisher.close()
    assert not subscriber._stopping.wait(1.0)
    assert caplog.records == []


# Faults by their numbers ------------------------------------------------------------------------------------------


def test_fault_16_a_subscriber_that_never_reads_slows_nobody_and_jumps_to_the_newest(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(updates: int) -> dict[str, np.ndarray]:
        return {"kernel": np.full(2**18, updates, np.float32)}

    publisher, well = link.publisher(), link.subscriber(large(0))
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
    frames = [bytes(frame) for frame in wire.encode(message_of(version=2**40, seed=2))]
    for number, frame in enumerate(frames):
        for place in range(len(frame)):
            flipped = frame[:place] + bytes([frame[place] ^ 1 << place % 8]) + frame[place + 1 :]
            publisher.send_multipart([*frames[:number], flipped, *frames[number + 1 :]])
    last = message_of(version=2**62, seed=3)
    wait_until(
        lambda: subscriber.newest is not None and subscriber.newest.version == last.version,
        meanwhile=lambda: sockets.send(publisher, last),
    )
    assert subscriber.newest is not None
    assert_equal_bits(subscriber.newest.params, params_of(3))


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
