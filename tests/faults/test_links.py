"""The links with failing connections: nothing is lost or counted twice, and no process is aborted."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from apex_jax.links import connection, experience_client, sampling_client
from apex_jax.links.sampling_client import Batches
from apex_jax.transport import sockets, wire
from apex_jax.transport.messages import ActorHello, SegmentAck
from tests.fuzz.tcp import frame, open_behind_the_handshake
from tests.rigs import experience_link, sampling_link
from tests.rigs.links import CONFIG, TRANSITIONS, segment_of, wait_until
from tests.rigs.processes import ROOT
from tests.rigs.proxy import Proxy
from tests.rigs.validity import check_buffer


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead peer is noticed after 0.9 s, not 10 or 20."""
    monkeypatch.setattr(experience_client, "PEER_TIMEOUT_SECONDS", 0.9)
    monkeypatch.setattr(sampling_client, "SILENT_SECONDS", 0.9)
    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.3)


class HalfAnActor:
    """An actor at the level of tcp: its bytes can end in the middle of a frame."""

    def __init__(self, address: str) -> None:
        self._connection = open_behind_the_handshake(int(address.rpartition(":")[2]), b"")

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
        connections = proxy.accepted
        getattr(proxy, fault)()
        for number in range(21, 41):
            assert stream.put(segment_of(number), timeout_seconds=1.0)
        server.until(lambda: proxy.accepted > connections)  # the actor has given up the old one
        proxy.heal()
        server.until(lambda: len(server.stored()) == 40)
        assert server.stored() == list(range(1, 41))
        assert server.replay.ledger.steps == 40 * TRANSITIONS
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
            if item is not None and isinstance(item.content, Batches):
                updates += 1
                learner.stream.update_priorities(item, np.full(item.content.indices.shape, updates, np.float32))

        def serve() -> None:
            server.serve()
            learn()

        wait_until(lambda: updates >= 20, serve)
        connections = proxy.accepted
        getattr(proxy, fault)()
        server.insert(2)
        wait_until(lambda: proxy.accepted > connections, serve)
        proxy.heal()
        held_at = updates
        wait_until(lambda: updates >= held_at + 20, serve)
        assert len(applied) == len(set(applied)), "an update was applied twice"
        assert applied[-1] > held_at
        assert learner.ring[:5].tolist() == [1, 2, 3, 4, 5]
        check_buffer(server.buffer)
        learner.stream.close()


# A full queue, at which libzmq must not abort the process --------------------------------------------------------

READER_IS_BUSY = "time.sleep(4)\nprint('alive')\n"  # longer than the interval of usual heartbeats

SERVER = """
import socket, struct, time, zmq
from apex_jax.transport import sockets
from tests.fuzz.tcp import RESET, frame, open_behind_the_handshake
from tests.rigs.links import free_address
address = free_address()
server = sockets.serve("experience", zmq.Context(), address)
client = open_behind_the_handshake(int(address.rpartition(":")[2]), b"")
client.settimeout(1)
try:
    while True:
        client.sendall(frame(b"x") * 1000)
except TimeoutError:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()
"""
CLIENT_OF_WEIGHTS = """
import time, zmq
from apex_jax.transport import sockets
from tests.rigs.links import free_address
address = free_address()
learner = sockets.serve("weights", zmq.Context(), address)
client = sockets.connect("weights", zmq.Context(), address)
assert client.poll(10_000, zmq.POLLOUT)
client.send(b"request")
identity = learner.recv_multipart()[0]
learner.set(zmq.SNDTIMEO, 50)
try:
    for _ in range(300):
        learner.send_multipart([identity, b"header", bytes(100_000)])
except zmq.Again:
    pass
learner.close(linger=0)
"""


@pytest.mark.long
@pytest.mark.parametrize("script", [SERVER, CLIENT_OF_WEIGHTS], ids=["busy_server", "busy_client_of_weights"])
def test_fault_33_reset_with_a_full_queue_ends_no_process(script: str) -> None:
    command = [sys.executable, "-c", script + READER_IS_BUSY]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.stdout == "alive\n", result.stderr


FROZEN_SERVER = """
import sys, time, zmq
from apex_jax.transport import sockets
server = sockets.serve("experience", zmq.Context(), sys.argv[1])
print("serves", flush=True)
server.poll()
time.sleep(2)  # in which ZMQ's thread alone finds what has come, and that the actor is gone
received = 0
while server.poll(1_000):
    server.recv_multipart()
    received += 1
print(received)
"""


@pytest.mark.long
def test_fault_15_server_that_wakes_handles_the_messages_of_an_actor_that_has_left(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/experience"
    command = [sys.executable, "-c", FROZEN_SERVER, address]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server,
        zmq.Context() as context,
    ):
        assert server.stdout is not None
        assert server.stdout.readline() == "serves\n"
        with sockets.connect("experience", context, address) as actor:
            assert actor.poll(10_000, zmq.POLLOUT)
            server.send_signal(signal.SIGSTOP)
            for _ in range(4):
                for _ in range(sockets.UNREAD_MESSAGES // 3):
                    actor.send(b"x")
                time.sleep(1)  # a heartbeat, were there one, would stand between what is said
        server.send_signal(signal.SIGCONT)
        output, errors = server.communicate(timeout=60)
    assert server.returncode == 0, errors
    assert int(output) > sockets.UNREAD_MESSAGES, "its queue was not full"
