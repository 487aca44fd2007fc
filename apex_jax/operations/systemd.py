"""Heartbeats for systemd, which restarts a role that makes no progress (`WatchdogSec=` of its unit)."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

INTERVAL_SECONDS = 10.0
LIMIT_SECONDS = 3 * INTERVAL_SECONDS  # without a heartbeat, until systemd restarts the process


class Watchdog:
    """Sends heartbeats to systemd while this process is healthy; does nothing if systemd does not watch it.

    The unit's own `WatchdogSec=` must cover the time until the first heartbeat, with imports from a cold disk. After
    it, LIMIT_SECONDS applies.
    """

    def __init__(self, is_healthy: Callable[[], bool]) -> None:
        """`is_healthy`: called on the watchdog's thread."""
        self._is_healthy = is_healthy
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Starts the thread, if this process is the one that systemd watches."""
        watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        if watched and os.environ.get("WATCHDOG_USEC") and os.environ.get("NOTIFY_SOCKET"):
            self._thread.start()

    def close(self) -> None:
        """Ends the thread and restores the unit's limit, so that the process has as long to end as it had to start."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
            _notify(f"WATCHDOG_USEC={os.environ['WATCHDOG_USEC']}\nWATCHDOG=1")

    def _run(self) -> None:
        message = f"WATCHDOG_USEC={LIMIT_SECONDS * 1e6:.0f}\nWATCHDOG=1"
        while True:
            if self._is_healthy():
                _notify(message)
                message = "WATCHDOG=1"
            if self._closing.wait(INTERVAL_SECONDS):
                return


def _notify(message: str) -> None:
    address = os.environ["NOTIFY_SOCKET"]
    address = f"\0{address[1:]}" if address.startswith("@") else address  # an abstract socket name of Linux
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.sendto(message.encode(), address)
