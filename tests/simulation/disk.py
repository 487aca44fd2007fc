"""The disk of a replay server: real files; a simulated loss of power removes what was not synced."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apex_jax.replay import experience_log
from tests.simulation.clock import Clock, Killed


class Disk:
    """Counts the bytes that are safe. One for all replay servers, as their paths differ."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.full_until: dict[str, float] = {}  # by host
        self._synced: dict[str, int] = {}  # bytes by path
        self._made: dict[str, int] = {}  # number by path, in the order in which files were made
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        """Everything else is that of the module `os`, in whose place this object is."""
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = os.open(path, flags, mode)
        if flags & os.O_CREAT:
            self._made[str(path)] = next(self._numbers)
        return descriptor

    def writev(self, descriptor: int, buffers: list[bytes]) -> int:
        assert self.clock.task is not None
        process = self.clock.task.process
        if self.full_until.get(process.host, 0.0) > self.clock.now:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            process.effect()
        except Killed:  # in the middle of the write
            data = b"".join(buffers)
            os.write(descriptor, data[: self.clock.rng.randrange(len(data) + 1)])
            raise
        return os.writev(descriptor, buffers)

    def synchronize(self, path: Path) -> None:
        self._synced[str(path)] = os.stat(path).st_size  # raises FileNotFoundError as the real one does

    def power_loss(self, directory: Path) -> None:
        """Cuts the log somewhere behind what was synced. Names of files survive, as does the order of writes."""
        cut = False
        # Not in the order of names: a file whose head is torn holds no event, and the next one has the same number.
        for path in sorted(directory.glob("segments-*.log"), key=lambda path: self._made[str(path)]):
            size, safe = path.stat().st_size, self._synced.get(str(path), 0)
            if cut and not safe:
                path.unlink()
            elif safe < size:
                left = self.clock.rng.randint(safe, size)
                os.truncate(path, left)
                self._synced[str(path)] = left  # what has survived is on the disk
                cut = True
            else:
                assert not cut, f"{path} was synced before an older file"


class SimWriter:
    """In place of the thread that writes a snapshot: runs at a moment that the clock chooses."""

    clock: Clock  # set by the fleet

    def __init__(self, log: list[Path], obsolete: list[Any], write: Callable[[], None]) -> None:
        self.log = log
        self.obsolete = obsolete
        self.error: Exception | None = None
        self._write = write
        self._is_alive = True

    def start(self) -> None:
        assert self.clock.task is not None
        self._process = self.clock.task.process
        oracle = self._process.fleet.oracle
        self._written, self._is_disk_full = oracle.written(self._process), oracle.has_unwritten(self._process)
        self.clock.after(self.clock.rng.expovariate(2.0), self._run)

    def is_alive(self) -> bool:
        return self._is_alive

    def join(self, timeout: float) -> None:
        self._run()

    def _run(self) -> None:
        if not self._is_alive or not self._process.is_alive:
            return
        self._is_alive = False
        try:
            if self._is_disk_full:  # for the log, and so for a snapshot, too
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            experience_log.sync(self.log)
            self._process.fleet.oracle.on_synced(self._process, self._written)
            self._write()
        except Exception as error:
            self.error = error
