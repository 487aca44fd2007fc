"""An actor sends each segment until a server has stored it, in order, within its credit, or says what it drops."""

from __future__ import annotations

import numpy as np
import pytest

from apex_jax.links.experience_client import Outbox
from apex_jax.transport import wire
from apex_jax.transport.messages import ActorHello
from apex_jax.types import SegmentRecord
from tests.rigs.experience_link import CREDIT, KEY, Link, limiter_that_lets_in, put_all
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, segment_of, waiting_in
from tests.rigs.messages import speaking


def test_an_actor_of_another_configuration_is_refused_for_good_with_the_differences(experience: Link) -> None:
    server = experience.server()
    stream = experience.stream(compatibility_key=CONFIG.compatibility_key.replace("Pong-v5", "Other-v5"))
    server.until(stream.finished.is_set)
    differs = "environment.task: the replay server Pong-v5, this actor Other-v5; make them equal"
    assert str(stream.error).endswith(f": {differs}"), "and nothing that is equal"
    assert server.dropped["another_config"] >= 1
    assert server.service.actors == {}


def test_an_actor_without_credit_waits_and_loses_nothing(experience: Link) -> None:
    server = experience.server(limiter_that_lets_in(1))
    stream = experience.stream(queue_size=2)
    put_all(stream, range(1 + CREDIT + 2), server)
    server.until(lambda: waiting_in(server.service) == CREDIT)
    assert not stream.put(segment_of(99), 0.05)
    server.limiter.sampled += 10**6
    server.until(lambda: len(server.stored()) == 1 + CREDIT + 2)
    assert server.stored() == list(range(1 + CREDIT + 2))
    assert stream.put(segment_of(99), 5.0)
    assert stream.acknowledged <= len(server.stored()) * TRANSITIONS
    server.until(lambda: len(server.stored()) == 2 + CREDIT + 2)
    server.until(lambda: stream.acknowledged == (2 + CREDIT + 2) * TRANSITIONS)


def test_a_segment_with_nan_is_dropped_and_its_steps_are_counted(experience: Link) -> None:
    server = experience.server()
    stream = experience.stream()
    segment = segment_of(1)
    columns = segment.columns | {"priority": segment.columns["priority"] * np.float32("nan")}
    put_all(stream, range(1), server)
    assert stream.put(segment._replace(columns=columns), 5.0)
    put_all(stream, range(2, 3), server)
    server.until(lambda: server.stored() == [0, 2])
    assert stream.dropped == {"bad_priority": 1}
    server.until(lambda: server.replay.ledger.steps == 2 * TRANSITIONS + np.isnan(columns["priority"]).sum())


def test_overflow_drop_removes_the_oldest_unsent_segment_only_if_the_queue_is_full(experience: Link) -> None:
    server = experience.server(limiter_that_lets_in(1))
    stream = experience.stream(queue_size=3, overflow="drop")
    server.until(lambda: stream.wait_for_welcome(0))
    for number in range(1 + CREDIT):
        put_all(stream, range(number, number + 1), server)
        server.until(stream._segments.empty)
    server.until(lambda: waiting_in(server.service) == CREDIT)
    for number in range(90, 93):
        assert stream.put(segment_of(number), 5.0)
    assert +stream.dropped == {}
    for number in range(93, 98):
        assert stream.put(segment_of(number), 5.0)
    assert stream.dropped == {"overflow": 5}
    server.limiter.sampled += 10**6
    server.until(lambda: len(server.stored()) == 1 + CREDIT + 3)
    assert server.stored() == [*range(1 + CREDIT), 95, 96, 97]
    assert server.replay.ledger.steps == TRANSITIONS * (1 + CREDIT + 8), "those of the dropped are counted"


def test_fault_30_an_actor_refused_for_its_version_ends_with_both_versions_in_one_line(
    experience: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = experience.server()
    encode = wire.encode
    hello = speaking(wire.PROTOCOL_VERSION + 1, ActorHello(1, KEY, 4))
    monkeypatch.setattr(wire, "encode", lambda message: hello if isinstance(message, ActorHello) else encode(message))
    stream = experience.stream()
    server.until(stream.finished.is_set)
    versions = f"protocol version {wire.PROTOCOL_VERSION}, this process version {wire.PROTOCOL_VERSION + 1}"
    assert f"server speaks {versions}: run the same release" in str(stream.error)
    assert str(stream.error).isprintable()


def test_what_a_full_socket_or_a_later_server_with_less_credit_does_not_take_is_sent_later_in_order() -> None:
    outbox, sent, room = Outbox(7, SPEC), list[int](), 3

    def put(message: SegmentRecord) -> bool:
        if len(sent) == room:
            return False
        sent.append(message.sequence)
        return True

    for number in range(1, 5):
        outbox.add(segment_of(number), 0)
    outbox.flush(4, put)
    assert sent == [1, 2, 3]
    room = 99
    outbox.flush(4, put)
    outbox.on_new_connection()
    outbox.flush(2, put)
    assert sent == [1, 2, 3, 4, 1, 2]
    assert (outbox.acknowledge(5), outbox.acknowledge(1), len(outbox)) == (None, TRANSITIONS, 3)
    outbox.flush(2, put)
    assert sent[6:] == [3]
