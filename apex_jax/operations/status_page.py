"""The status that every process serves at `addresses.status`: its identity, its health, and its role's report."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from apex_jax.config import Config
from apex_jax.process import StopSignal
from apex_jax.run.metrics import resident_memory_bytes
from apex_jax.run.provenance import commit, version
from apex_jax.transport.addresses import is_loopback
from apex_jax.transport.status_link import StatusServer
from apex_jax.transport.wire import PROTOCOL_VERSION

_log = logging.getLogger(__name__)

STUCK_SECONDS = 60.0  # a process whose loop has not iterated for this long is not healthy
STARTING_SECONDS = 300.0  # the limit for a process that is younger than this, because it may compile


class StatusPage:
    """A context that serves the status of this process; without `addresses.status`, only systemd is notified.

    A role that can report sets `report`, which the page's thread calls, so that it must only read attributes.
    """

    def __init__(self, config: Config, role: str, name: str, stop: StopSignal):
        """`stop`: the process is healthy while the worker's loop keeps calling `stop.beat`, once in each iteration."""
        self.report: Callable[[], Mapping[str, Any]] = dict
        self._address = config.addresses.status
        self._role, self._name = role, name
        self._run = config.directory
        self._stop = stop
        self._started = time.monotonic()
        self._server: StatusServer | None = None
        self._watchdog = Watchdog(self.is_healthy)

    def __enter__(self) -> StatusPage:
        """Binds the address. Raises StatusError if that fails."""
        if self._address:
            self._server = StatusServer(self._address, self._answer)
            if not is_loopback(self._address):
                _log.warning("the status at %s is shown to whoever reaches that address", self._address)
        self._watchdog.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.close()
        if self._server is not None:
            self._server.close()

    def is_healthy(self) -> bool:
        """Returns whether the worker's loop has iterated recently."""
        is_starting = time.monotonic() - self._started < STARTING_SECONDS
        return self._stop.idle_seconds < (STARTING_SECONDS if is_starting else STUCK_SECONDS)

    def _answer(self) -> tuple[bool, dict[str, Any]]:
        healthy = self.is_healthy()
        content = {
            "role": self._role,
            "name": self._name,
            "run": self._run,
            "pid": os.getpid(),
            "healthy": healthy,
            "uptime_seconds": time.monotonic() - self._started,
            "progress_age_seconds": self._stop.idle_seconds,
            "versions": _versions(),
            "memory_bytes": resident_memory_bytes(),
            "file_descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }
        return healthy, _plain({**content, **self.report()})


@cache
def _versions() -> dict[str, Any]:
    packages = {name: version(name) for name in ("jax", "pyzmq", "envpool")}
    return {"apex_jax": commit(), "protocol": PROTOCOL_VERSION, **packages}


def _plain(value: Any) -> Any:
    """Returns the value for JSON: NumPy numbers become Python numbers, NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Heartbeats for systemd, which restarts a role that makes no progress (`WatchdogSec=` of its unit) -------------------


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
