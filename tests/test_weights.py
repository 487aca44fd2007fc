"""Specification of the weights link: publishers and subscribers on their threads, over real sockets."""

from __future__ import annotations

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

from apex_jax.errors import RunError
from apex_jax.links import weights
from apex_jax.links.weights import WeightsPublisher
from apex_jax.transport import monitor, sockets
from apex_jax.transport.messages import WeightsMessage
from tests.links import wait_until
from tests.weights_link import AGREEMENT, Link, assert_equal_bits, message_of, newest, params_of


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.close()


def with_last(value: float) -> dict[str, Any]:
    """The fields of a message that is sound but for its last parameter."""
    body = message_of(version=2, seed=2).body[:-4] + np.float32(value).tobytes()
    return {"body": body, "crc": zlib.crc32(body)}


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
        ({"agreement": AGREEMENT + "9"}, "another_config"),
        ({"crc": 1}, "bad_checksum"),
        ({"body": b"abcd", "crc": zlib.crc32(b"abcd")}, "bad_length"),
        (with_last(np.nan), "not_finite"),
        (with_last(np.inf), "not_finite"),
        (with_last(-np.inf), "not_finite"),
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


def test_a_network_of_another_shape_is_refused_by_name_of_its_digest(
    link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, subscriber = link.publisher(), link.subscriber({"q": jnp.zeros((4, 3))})
    publisher.publish(params_of(1), 1, 0)
    wait_until(lambda: subscriber.dropped["another_architecture"] >= 1)
    assert subscriber.newest is None
    wait_until(lambda: "another_architecture; set network.* as the learner has it" in caplog.text)


def test_a_network_larger_than_ours_is_cut_off_before_it_is_read_and_said_once(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor, "RECONNECT_SECONDS", 0.1)
    publisher, subscriber = link.publisher(), link.subscriber()
    limit = subscriber._socket.get(zmq.MAXMSGSIZE)
    assert limit == sockets.SMALL_MESSAGE_BYTES + sockets.ENCRYPTION_BYTES, "its 108 bytes are fewer than a header's"
    publisher.publish({"kernel": np.zeros(limit // 4 + 1, np.float32)}, 1, 0)
    wait_until(lambda: subscriber.dropped["too_large"] >= 2)
    assert caplog.text.count(f"the learner at {link.address} sent something too long for this run") == 1
    publisher.publish(params_of(2), 2, 0)
    newest(subscriber, 2)


def test_a_subscriber_of_a_smaller_network_gives_up_and_says_which_settings_differ(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "RECONNECT_SECONDS", 0.1)
    monkeypatch.setattr(weights, "RESEND_SECONDS", 0.1)
    large = {"kernel": np.zeros(sockets.SMALL_MESSAGE_BYTES, np.float32)}
    publisher, well, subscriber = link.publisher(), link.subscriber(large), link.subscriber()
    for updates, cut_offs in ((1, 2), (3, 5)):  # with weights that it can read in between: five, but not in a row
        publisher.publish(large, updates, 0)
        wait_until(lambda at_least=cut_offs: subscriber.dropped["too_large"] >= at_least)  # type: ignore[misc]
        publisher.publish(params_of(2), updates + 1, 0)
        newest(subscriber, updates + 1)
    publisher.publish(large, 5, 0)
    with pytest.raises(
        RunError, match=rf"of the learner at {link.address} are longer .*: set environment\.\* and network\.\* as"
    ):
        wait_until(lambda: subscriber.newest is None)
    assert subscriber.peer_state == "refused"
    newest(well, 5)
    wait_until(lambda: publisher.subscribers == 1)


def test_weights_are_sent_again_for_newcomers_no_oftener_than_said(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    send, sent = sockets.send, list[WeightsMessage]()

    def watched(socket: zmq.Socket, message: Any) -> bool:
        sent.extend([message] if isinstance(message, WeightsMessage) else [])
        return send(socket, message)

    monkeypatch.setattr(sockets, "send", watched)
    monkeypatch.setattr(weights, "RESEND_SECONDS", 1_000.0)
    publisher, _ = link.publisher(), link.subscriber()
    publisher.publish(params_of(1), 1, 0)
    wait_until(lambda: len(sent) == 2)
    late = link.subscriber()
    assert late.wait(1.0) is None
    assert len(sent) == 2
    publisher.publish(params_of(2), 2, 0)
    newest(late, 2)


def test_a_subscriber_takes_no_more_than_the_parameters_of_its_network(link: Link) -> None:
    subscriber = link.subscriber({"kernel": np.zeros((300, 300), np.float32)})
    assert subscriber._socket.get(zmq.MAXMSGSIZE) == 4 * 300 * 300 + sockets.ENCRYPTION_BYTES


def test_an_address_in_use_is_one_line_and_leaves_nothing_open(link: Link) -> None:
    link.publisher()
    context = zmq.Context()
    with pytest.raises(sockets.BindError, match=rf"addresses\.weights={link.address} cannot be served") as caught:
        WeightsPublisher(context, link.address, run_id=2, first_version=0, agreement=AGREEMENT)
    assert str(caught.value).isprintable()
    context.term()
    assert context.closed


def test_a_subscriber_without_a_publisher_can_be_closed(link: Link) -> None:
    subscriber = link.subscriber()
    subscriber.close()
    assert not subscriber._thread.is_alive()


def test_a_publisher_knows_how_many_listen(link: Link) -> None:
    publisher, subscribers = link.publisher(), [link.subscriber() for _ in range(3)]
    assert [subscriber.peer_state for subscriber in subscribers] == ["connecting"] * 3
    publisher.publish(params_of(1), 1, 0)
    wait_until(lambda: publisher.subscribers == 3)
    wait_until(lambda: all(subscriber.peer_state == "joined" for subscriber in subscribers))
    subscribers[0].close()
    wait_until(lambda: publisher.subscribers == 2)


# Signs of life ----------------------------------------------------------------------------------------------------


def test_a_learner_without_news_is_no_silent_one(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights, "ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(weights, "PEER_TIMEOUT_SECONDS", 2.0)
    publisher, subscriber = link.publisher(), link.subscriber()
    publisher.publish(params_of(1), 1, 0)
    newest(subscriber, 1)
    assert subscriber._heard_seconds is not None
    later = subscriber._heard_seconds + 3.0
    wait_until(lambda: (subscriber._heard_seconds or 0.0) >= later)
    assert caplog.records == []


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
