"""The page of a fleet: what its processes report, each as a tile, and their metrics in the charts of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from apex_jax.host.errors import short_repr
from apex_jax.operations.records import ProcessStatus, Record
from apex_jax.operations.run_page import POLL_SECONDS, KeptLines, answer_of_page, charts, serve_page
from apex_jax.process import StopSignal


class FleetPage:
    """Collects the reports of a fleet's processes, from the start of the command on."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], KeptLines] = {}  # by name and address
        self._newest: dict[tuple[str, str], Mapping[str, float]] = {}
        self._frames = 0.0  # of the run, by the newest report that has a count
        self.data: dict[str, Any] = {}

    def update(self, statuses: Sequence[ProcessStatus]) -> None:
        """Shows these from now on."""
        self._frames = max((status.frames for status in statuses), default=0) or self._frames
        for status in statuses:
            values, process = status.metrics, (status.name, status.address)
            if values and values != self._newest.get(process):  # a process writes them only at times
                self._newest[process] = values
                lines = self._lines.setdefault(process, KeptLines())
                step = values.get("eval/frames", self._frames)  # an evaluation is of older weights
                lines.add({**values, "time": time.time(), "step": step})
        wrong = [f"{status.name}: {problem}" for status in statuses for problem in status.problems]
        advice = [f"{status.name}: {warning}" for status in statuses for warning in status.warnings]
        kept = [line for lines in self._lines.values() for line in lines.lines]
        self.data = {
            "task": "Fleet",
            "phase": f"{len(wrong)} problem{'s' * (len(wrong) > 1)}" if wrong else "works",
            "share": None,
            "written": time.strftime("%Y-%m-%d %H:%M:%S"),
            "poll_seconds": POLL_SECONDS,
            "warnings": [*wrong, *advice],
            "tiles": [_tile(status)._asdict() for status in statuses],
            "charts": charts([], kept, POLL_SECONDS),
            "facts": [[status.name, f"{status.address}  {_run_of(status)}"] for status in statuses],
            "settings": [],
            "video": None,
        }


def serve(ask: Callable[[], Sequence[ProcessStatus]], port: int) -> int:
    """Serves the page on this machine until SIGINT or SIGTERM; returns the exit code. Raises RunError."""
    page, stop = FleetPage(), StopSignal()
    stop.install()
    page.update(ask())
    fix = "choose another port, or 0 for any that is free"
    server, address = serve_page(port, "status: --page ", fix, lambda path: answer_of_page(path, lambda: page.data))
    print(f"Watch the fleet at {address}; Ctrl-C ends the page, not the fleet", flush=True)
    try:
        while not stop.wait(POLL_SECONDS):
            page.update(ask())
    finally:
        server.close()
    return stop.exit_code


def _tile(status: ProcessStatus) -> Record:
    does, speed, progress = status.cells
    return Record(status.name, does, speed, progress)


def _run_of(status: ProcessStatus) -> str:
    return short_repr(status.content["run"]) if status.content is not None and "run" in status.content else ""
