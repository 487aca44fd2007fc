"""Ports that no other test, and no outgoing connection, can take in the meantime."""

from __future__ import annotations

import itertools
import os
import socket

WORKERS, PORTS_EACH = 10, 2_000
FIRST = 10_000  # the kernel gives outgoing connections and port 0 those from 32,768 on
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
_start = os.getpid() % PORTS_EACH  # apart from another run of the tests on this machine
_ports = itertools.cycle(FIRST + PORTS_EACH * _worker + (_start + i) % PORTS_EACH for i in range(PORTS_EACH))


def free_port() -> int:
    """Returns a port of this machine that nobody serves."""
    while True:
        port = next(_ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
