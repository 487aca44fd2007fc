"""The status that every process serves at `addresses.status`: its identity, its health, and its role's report."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from apex_jax.config import Config
from apex_jax.operations.systemd import Watchdog
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
