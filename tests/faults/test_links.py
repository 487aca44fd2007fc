"""The links of experience with failing connections: nothing is lost or counted twice."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest

from apex_jax.links import connection, experience_client, sampling_client
from apex_jax.transport import wire
from apex_jax.transport.messages import ActorHello, IndexBatches, SegmentAck
from tests.fuzz.tcp import GREETING, frame, ready
from tests.rigs import experience_link, sampling_link
from tests.rigs.links import CONFIG, TRANSITIONS, segment_of, wait_until
from tests.rigs.proxy import Proxy


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead peer is noticed after 0.9 s, not 10 or 20."""
    monkeypatch.setattr(experience_client, "PEER_TIMEOUT_SECONDS", 0.9)
    monkeypatch.setattr(sampling_client, "SILENT_SECONDS", 0.9)
    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.3)


class HalfAnActor:
    """An actor at the level of tcp: its bytes can end in the middle of a frame."""

    def __init__(self, address: str) -> None:
        self._connection = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20)
        self._connection.sendall(GREETING + ready(b"DEALER"))
        received = b""
        while b"READY" not in received:  # what comes before that is no message
            received += self._connection.recv(4096)

    def send(self, message: Any, cut: int = 0) -> None:
        """Sends a message without its last `cut` bytes."""
        frames = [bytes(part) for part in wire.encode(message)]
        data = b"".join(frame(part, more=number < len(frames)) for number, part in enumerate(frames, start=1))
        self._connection.sendall(data[: len(data) - cut])

    def leave(self) -> None:
        """Disconnects, and waits until the other end has noticed it."""
        self._connection.shutdown(socket.SHUT_WR)
        while self._connection.recv(4096):
            pass
        self._connection.close()


def test_fault_01_incomplete_segment_of_a_dead_actor_is_not_stored(experience: experience_link.Link) -> None:
    server, segment = experience.server(), experience_link.message_of(2)
    actor = HalfAnActor(experience.address)
    actor.send(ActorHello(1, CONFIG.compatibility_key, num_environments=4))
    actor.send(experience_link.message_of(1))
    server.until(lambda: server.stored() == [1])
    actor.send(segment, cut=1)
    actor.leave()
    back = experience.peer(server, peer_id=1)
    assert server.stored() == [1]
    assert +server.dropped == {}
    back.send(segment)
    while back.receive(SegmentAck).sequence < 2:
        pass
    assert server.stored() == [1, 2]


@pytest.mark.parametrize("fault", ["lose", "stop"])
def test_fault_31_each_segment_is_stored_exactly_once_despite_connection_failures(
    experience: experience_link.Link, fault: str
) -> None:
    server = experience.server()
    with Proxy(experience.address) as proxy:
        experience.address = proxy.address
        stream = experience.stream(queue_size=100)
        server.until(lambda: stream.wait_for_welcome(0))
        for number in range(1, 21):
            assert stream.put(segment_of(number), timeout_seconds=1.0)
        server.until(lambda: len(server.stored()) >= 5)
        connections = proxy.traffic.connections
        getattr(proxy, fault)()
        for number in range(21, 41):
            assert stream.put(segment_of(number), timeout_seconds=1.0)
        server.until(lambda: proxy.traffic.connections > connections)  # the actor has given up the old one
        proxy.heal()
        server.until(lambda: len(server.stored()) == 40)
        assert server.stored() == list(range(1, 41))
        assert server.replay.environment_steps == 40 * TRANSITIONS
        assert server.dropped.keys() <= {"duplicate_segment"}
        stream.close()


@pytest.mark.parametrize("fault", ["reset", "stop"])
def test_fault_32_no_priority_is_applied_twice_and_no_batch_uses_other_segments(
    sampling: sampling_link.Link, fault: str
) -> None:
    server = sampling.server()
    server.insert(3)
    applied: list[float] = []
    update = server.buffer.update_priorities

    def recorded(indices: np.ndarray, generations: np.ndarray, priorities: np.ndarray) -> Any:
        applied.extend(set(priorities.tolist()))
        return update(indices, generations, priorities)

    server.buffer.update_priorities = recorded  # type: ignore[method-assign]
    with Proxy(sampling.address) as proxy:
        sampling.address = proxy.address
        learner = sampling_link.Learner(sampling.stream())
        updates = 0

        def learn() -> None:
            nonlocal updates
            item = learner.consume()  # asserts that every batch fits the segments that have come
            if item is not None and isinstance(item.content, IndexBatches):
                updates += 1
                learner.stream.update_priorities(item, np.full(item.content.indices.shape, updates, np.float32))

        def serve() -> None:
            server.serve()
            learn()

        wait_until(lambda: updates >= 20, serve)
        connections = proxy.traffic.connections
        getattr(proxy, fault)()
        server.insert(2)
        wait_until(lambda: proxy.traffic.connections > connections, serve)
        proxy.heal()
        held_at = updates
        wait_until(lambda: updates >= held_at + 20, serve)
        assert len(applied) == len(set(applied)), "an update was applied twice"
        assert applied[-1] > held_at
        assert learner.ring[:5].tolist() == [1, 2, 3, 4, 5]
        server.buffer.check_valid()
        learner.stream.close()
