"""Signs of life for systemd, which starts a role again that lives and does nothing: `WatchdogSec=` of its unit."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

INTERVAL_SECONDS = 10.0
LIMIT_SECONDS = 3 * INTERVAL_SECONDS  # without a sign


class Watchdog:
    """Tells systemd that this process is well for as long as it is; does nothing where systemd does not ask.

    The unit's own `WatchdogSec=` has to last until here: for imports on a cold disk. From then on LIMIT_SECONDS holds.
    """

    def __init__(self, is_healthy: Callable[[], bool]) -> None:
        """`is_healthy`: called on a thread of its own."""
        self._is_healthy = is_healthy
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Starts the thread, if this process is the one that systemd watches."""
        watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        if watched and os.environ.get("WATCHDOG_USEC") and os.environ.get("NOTIFY_SOCKET"):
            self._thread.start()

    def close(self) -> None:
        """Ends the thread; the process then has as long to end as it had to start."""
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
    address = f"\0{address[1:]}" if address.startswith("@") else address  # Linux: a name that is no file
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.sendto(message.encode(), address)
