"""An actor's stream sends each segment until a server has stored it, in order, and reports why it was refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from apex_jax.transport import wire
from apex_jax.transport.messages import ActorHello
from tests.rigs.experience_link import CREDIT, KEY, Link, limiter_that_lets_in, link, put_all
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, segment_of, waiting_in
from tests.rigs.messages import speaking

__all__ = ["link"]


def test_an_actor_of_another_configuration_is_refused_for_good_with_the_differences(link: Link) -> None:
    server = link.server()
    stream = link.stream(compatibility_key=CONFIG.compatibility_key.replace("Pong-v5", "Other-v5"))
    server.until(stream.finished.is_set)
    differs = "environment.task: the replay server Pong-v5, this actor Other-v5; make them equal"
    assert str(stream.error).endswith(f": {differs}"), "and nothing that is equal"
    assert server.dropped["another_config"] >= 1
    assert server.service.actors == {}


def test_segments_are_stored_in_order_and_their_steps_summed(link: Link) -> None:
    server = link.server()
    stream = link.stream()
    put_all(stream, range(20), server)
    server.until(lambda: len(server.stored()) == 20)
    assert server.stored() == list(range(20))
    assert server.replay.environment_steps == 200
    server.until(lambda: not stream._outbox)
    assert +server.dropped == {}


def test_an_actor_without_credit_waits_and_loses_nothing(link: Link) -> None:
    server = link.server(limiter_that_lets_in(1))
    stream = link.stream(queue_size=2)
    put_all(stream, range(1 + CREDIT + 2), server)
    server.until(lambda: waiting_in(server.service) == CREDIT)
    assert not stream.put(segment_of(99), 0, 0.05)
    assert len(stream._outbox) == CREDIT
    server.limiter.sample(10**6)
    server.until(lambda: len(server.stored()) == 1 + CREDIT + 2)
    assert server.stored() == list(range(1 + CREDIT + 2))
    assert stream.put(segment_of(99), 0, 5.0)
    assert stream.acknowledged <= len(server.stored()) * TRANSITIONS
    server.until(lambda: len(server.stored()) == 2 + CREDIT + 2)
    server.until(lambda: stream.acknowledged == (2 + CREDIT + 2) * TRANSITIONS)


def test_a_segment_with_nan_is_dropped_and_its_steps_are_added_to_the_next(link: Link) -> None:
    server = link.server()
    stream = link.stream()
    segment = segment_of(1)
    columns = segment.columns | {"priority": segment.columns["priority"] * np.float32("nan")}
    put_all(stream, range(1), server)
    assert stream.put(segment._replace(columns=columns), 10, 5.0)
    put_all(stream, range(2, 3), server)
    server.until(lambda: server.stored() == [0, 2])
    assert stream.dropped == {"bad_priority": 1}
    assert server.replay.environment_steps == 30


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_client_whose_thread_fails_is_finished_and_has_the_error(link: Link) -> None:
    server = link.server()
    stream = link.stream()
    assert stream.put(segment_of(1)._replace(frames=np.zeros(3, np.float32)), 0, 5.0)
    server.until(stream.finished.is_set)
    assert "the segment spec says" in str(stream.error)


@pytest.mark.parametrize("seed", range(3))
def test_segments_sent_while_servers_come_and_go_are_each_stored_by_one_that_acknowledged(
    link: Link, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    stream = link.stream(queue_size=64)
    for number in range(24):
        assert stream.put(segment_of(number), 10, 5.0)

    def all_acknowledged() -> bool:
        return stream._outbox._sequence == 24 and not stream._outbox

    stored_anywhere: set[int] = set()
    for enough in [*rng.integers(1, 8, 3), 24]:
        stored = link.server().store_at_least(int(enough), or_until=all_acknowledged)
        assert stored == sorted(set(stored)), "in order, and each once"
        stored_anywhere |= set(stored)
    assert stored_anywhere == set(range(24))


def test_a_server_that_comes_back_with_less_credit_gets_everything_in_turn(link: Link) -> None:
    server = link.server(limiter_that_lets_in(1))
    stream = link.stream(queue_size=8)
    put_all(stream, range(1 + CREDIT), server)
    server.until(lambda: waiting_in(server.service) == CREDIT)
    server.close()
    smaller = CONFIG.replace(actor=replace(CONFIG.actor, max_outstanding_segments=1))
    server = link.server(limiter_that_lets_in(1), smaller)
    server.until(lambda: waiting_in(server.service) == 1)
    server.limiter.sample(10**6)
    server.until(lambda: len(server.stored()) == CREDIT)
    assert server.stored() == list(range(1, 1 + CREDIT))
    assert server.dropped["over_credit"] == 0


def test_overflow_drop_removes_the_oldest_unsent_segment_only_if_the_queue_is_full(link: Link) -> None:
    server = link.server(limiter_that_lets_in(1))
    stream = link.stream(queue_size=3, overflow="drop")
    server.until(lambda: stream.wait_for_welcome(0))
    for number in range(1 + CREDIT):
        put_all(stream, range(number, number + 1), server)
        server.until(stream._produced.empty)
    server.until(lambda: waiting_in(server.service) == CREDIT)
    for number in range(90, 93):
        assert stream.put(segment_of(number), 10, 5.0)
    assert +stream.dropped == {}
    for number in range(93, 98):
        assert stream.put(segment_of(number), 10, 5.0)
    assert stream.dropped == {"overflow": 5}
    server.limiter.sample(10**6)
    server.until(lambda: len(server.stored()) == 1 + CREDIT + 3)
    assert server.stored() == [*range(1 + CREDIT), 95, 96, 97]
    assert server.replay.environment_steps == 10 * (1 + CREDIT + 8), "those of the dropped are carried on"
    server.until(lambda: server.service.totals()["dropped_overflow"] == 5 * TRANSITIONS)


def test_steps_of_many_dropped_segments_are_carried_by_several_later_ones(link: Link) -> None:
    server = link.server()
    stream = link.stream()
    server.until(lambda: stream.wait_for_welcome(0))
    most = SPEC.max_environment_steps(4)
    stream.put(segment_of(0), 3 * most + 10, 1.0)  # as behind an hour of dropping
    server.until(lambda: server.stored() == [0])
    assert server.replay.environment_steps == most
    put_all(stream, range(1, 5), server)
    server.until(lambda: len(server.stored()) == 5)
    assert server.replay.environment_steps == 3 * most + 10 + 4 * 10
    assert +server.dropped == {}


def test_an_actor_refused_for_its_version_ends_with_both_versions_in_one_line(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = link.server()
    encode = wire.encode
    hello = speaking(wire.PROTOCOL_VERSION + 1, ActorHello(1, KEY, 4))
    monkeypatch.setattr(wire, "encode", lambda message: hello if is_hello(message) else encode(message))
    stream = link.stream()
    server.until(stream.finished.is_set)
    versions = f"protocol version {wire.PROTOCOL_VERSION}, this process version {wire.PROTOCOL_VERSION + 1}"
    assert f"server speaks {versions}: run the same release" in str(stream.error)
    assert str(stream.error).isprintable()


def is_hello(message: Any) -> bool:
    return isinstance(message, ActorHello)
