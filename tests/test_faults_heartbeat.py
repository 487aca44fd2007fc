"""A connection that breaks while its queue is full: libzmq must not take the process with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import ROOT

READER_IS_BUSY = "time.sleep(4)\nprint('alive')\n"  # longer than the interval of the heartbeats

SERVER = """
import socket, struct, time, zmq
from apex_jax.transport import sockets
from tests.fuzz_tcp import GREETING, RESET, frame, ready
from tests.links import free_address
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
SUBSCRIBER = """
import time, zmq
from apex_jax.transport import sockets
from tests.links import free_address
address = free_address()
learner = sockets.serve_weights(zmq.Context(), address)
subscriber = sockets.connect_weights(zmq.Context(), address)
assert learner.poll(10_000)
for _ in range(300):
    learner.send_multipart([b"header", bytes(100_000)])
    time.sleep(0.005)
learner.close(linger=0)
"""


@pytest.mark.parametrize("script", [SERVER, SUBSCRIBER], ids=["a_peer_of_a_busy_server", "the_learner_of_a_busy_actor"])
def test_fault_33_a_reset_behind_a_full_queue_ends_nobody(script: str) -> None:
    command = [sys.executable, "-c", script + READER_IS_BUSY]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.stdout == "alive\n", result.stderr
