"""Parts common to the clients of the three links: the thread that holds the connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq

from apex_jax.host.errors import RunError
from apex_jax.links.connection import Connection
from apex_jax.transport.monitor import ClientMonitor


class LinkClient:
    """A connection, and a thread that takes turns at it until `close`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.name = connection.name  # of the server for users, with its address
        self.dropped = connection.dropped  # counts of refusals, and of messages that could not be sent or used
        self._closing = threading.Event()
        self._thread: threading.Thread  # see `_start`

    @property
    def peer_state(self) -> str:
        """State of the server, see `Connection`."""
        return self._connection.state

    @property
    def disconnects(self) -> int:
        """Losses of servers that had welcomed this client."""
        return self._connection.disconnects

    def turn(self, now_seconds: float) -> None:
        """Sends a hello or heartbeat if one is due, and queued messages; handles received messages."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the thread, which leaves the server with a goodbye."""
        self._closing.set()
        self._thread.join()

    def _start(self, connect: Callable[[ClientMonitor], zmq.Socket], name: str) -> None:
        """Starts the thread; the last step of a subclass's `__init__`."""
        self._thread = threading.Thread(target=self._run, args=(connect,), name=name)
        self._thread.start()

    def _run(self, connect: Callable[[ClientMonitor], zmq.Socket]) -> None:
        with self._connection.open(connect, self._fail) as socket:
            while not self._closing.is_set():
                self._wait(socket)
                self.turn(time.monotonic())
            self._leave(socket)

    def _wait(self, socket: zmq.Socket) -> None:
        """Returns once there is something to do, or after a tenth of a second at most."""
        socket.poll(100)

    def _leave(self, socket: zmq.Socket) -> None:
        """Sends the last messages."""

    def _fail(self, error: RunError) -> None:
        """Makes the error known to the threads that wait for this client."""
        raise NotImplementedError
