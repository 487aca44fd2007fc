"""A connection that breaks while its queue is full; libzmq must not abort the process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from apex_jax.transport import sockets
from tests.rigs.processes import ROOT

pytestmark = pytest.mark.long
READER_IS_BUSY = "time.sleep(4)\nprint('alive')\n"  # longer than the interval of usual heartbeats

SERVER = """
import socket, struct, time, zmq
from apex_jax.transport import sockets
from tests.fuzz.tcp import GREETING, RESET, frame, ready
from tests.rigs.links import free_address
address = free_address()
server = sockets.serve_experience(zmq.Context(), address)
client = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
client.sendall(GREETING + ready(b"DEALER"))
received = b""
while b"READY" not in received:  # what comes before that may end in another way
    received += client.recv(4096)
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
learner = sockets.serve_weights(zmq.Context(), address)
client = sockets.connect_weights(zmq.Context(), address)
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


@pytest.mark.parametrize("script", [SERVER, CLIENT_OF_WEIGHTS], ids=["busy_server", "busy_client_of_weights"])
def test_fault_33_reset_with_a_full_queue_ends_no_process(script: str) -> None:
    command = [sys.executable, "-c", script + READER_IS_BUSY]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.stdout == "alive\n", result.stderr


FROZEN_SERVER = """
import sys, time, zmq
from apex_jax.transport import sockets
server = sockets.serve_experience(zmq.Context(), sys.argv[1])
print("serves", flush=True)
server.poll()
time.sleep(2)  # in which ZMQ's thread alone finds what has come, and that the actor is gone
received = 0
while server.poll(1_000):
    server.recv_multipart()
    received += 1
print(received)
"""


def test_fault_15_server_that_wakes_handles_the_messages_of_an_actor_that_has_left(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/experience"
    command = [sys.executable, "-c", FROZEN_SERVER, address]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server,
        zmq.Context() as context,
    ):
        assert server.stdout is not None
        assert server.stdout.readline() == "serves\n"
        with sockets.connect_experience(context, address) as actor:
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
