"""A tcp proxy that imitates network faults, which a test switches while connections are in use.

One thread, an event loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

CHUNK_BYTES = 16_384
RETRY_SECONDS = 0.1  # until the server behind the proxy is there
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing drops everything and sends RST


@dataclass(eq=False)
class Connection:
    """A client's connection and the proxy's connection to the server, if there is one."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    is_lost: bool = False  # open for ever, and nothing passes any more

    def writers(self) -> list[asyncio.StreamWriter]:
        return [writer for writer in (self.client, self.server) if writer is not None]


class Proxy:
    """Forwards from clients to `target`, a tcp:// address that need not be served yet."""

    def __init__(self, target: str) -> None:
        self.accepted = 0  # connections
        self.bytes_per_second = float("inf")  # each way of each connection; any thread may set it
        self._is_stopped = False  # nothing passes
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def stop(self) -> None:
        """Lets nothing pass, like a partition: connections stay open, and new ones are accepted."""
        self._is_stopped = True

    def heal(self) -> None:
        """Lets everything pass again, including held bytes, which TCP would send again."""
        self._is_stopped = False

    def lose(self) -> None:
        """Drops the state of all current connections, like a restarted NAT: they stay open, but nothing passes."""

        def lose() -> None:
            for connection in self._connections:
                connection.is_lost = True

        self._in_loop(lose)

    def reset(self) -> None:
        """Resets all current connections on both sides."""

        def reset() -> None:
            for connection in list(self._connections):
                self._abort(connection)

        self._in_loop(reset)

    def close(self) -> None:
        """Closes everything and ends the thread."""
        self._in_loop(self._loop.stop)
        self._thread.join()

    def _in_loop(self, action: Callable[[], Any]) -> None:
        """Calls a function on the proxy's thread and waits for it."""
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._loop.call_soon_threadsafe(act)
        assert done.wait(10), "the proxy's thread does not answer"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._listener))
        self._loop.run_forever()
        server.close()
        for task in [*self._tasks]:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        for connection in list(self._connections):
            self._abort(connection)
        self._loop.run_until_complete(asyncio.sleep(0))  # the transports close
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = Connection(client)
        self._connections.add(connection)
        self.accepted += 1
        try:
            await self._passes(connection)  # into a black hole nobody is connected any further
            server_reader, connection.server = await self._connect()
            await self._pump_both_ways(connection, reader, server_reader)
        except OSError:  # reset by one side: the other is told in the same way
            pass
        except asyncio.CancelledError:  # the proxy is closed
            pass
        finally:
            self._abort(connection)
            self._tasks.discard(task)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(*self._target)
            await asyncio.sleep(RETRY_SECONDS)

    async def _pump_both_ways(
        self, connection: Connection, reader: asyncio.StreamReader, server_reader: asyncio.StreamReader
    ) -> None:
        """Forwards until one direction has ended."""
        assert connection.server is not None
        ways = ((reader, connection.server), (server_reader, connection.client))
        tasks = [asyncio.ensure_future(self._pump(connection, *way)) for way in ways]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards bytes in one direction, and then the end of the stream."""
        is_open = True
        while is_open:
            data = await reader.read(CHUNK_BYTES)
            await self._passes(connection)
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(len(data) / self.bytes_per_second)
            is_open = bool(data)

    async def _passes(self, connection: Connection) -> None:
        """Returns once the connection is open; of a lost one that is never."""
        while connection.is_lost or self._is_stopped:
            await asyncio.sleep(0.01)

    def _abort(self, connection: Connection) -> None:
        self._connections.discard(connection)
        for writer in connection.writers():
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
