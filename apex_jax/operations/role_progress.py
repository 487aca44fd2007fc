"""The progress of one process, for its status and its log: counts, the age of each, and warnings."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, SupportsFloat

from apex_jax.config import Config
from apex_jax.operations.diagnosis import Diagnosis
from apex_jax.process import SUPERVISED

_log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at the counts
LINE_SECONDS = 60.0  # between two lines in the log
# Not diagnosed: the status shows what these say, and their warnings name logs that only a local run has.
SHOWN = ("actor/weights_age_", "learner/checkpoint_age_", "storage/copy_age_", "replay/size_")


class _Count(NamedTuple):
    """A count of what the process does, such as updates."""

    number: int
    changed_seconds: float  # when it last changed; if it never did, when it was first read
    has_changed: bool  # since the start of the process


class RoleProgress:
    """A context whose thread reads the counts of a role every second, so that the role's loop need not track ages."""

    def __init__(
        self,
        config: Config,
        counts: Callable[[], Mapping[str, int]],
        metrics: Callable[[], Mapping[str, SupportsFloat]],
    ) -> None:
        """`counts`: by name, such as "updates"; `metrics`: the newest values by tag. Both are called on the thread."""
        self._config = config
        self._read_counts, self._read_metrics = counts, metrics
        self._counts: dict[str, _Count] = {}
        self._logged: dict[str, int] = {}  # the counts at the last line
        self._values: dict[str, float] = {}  # newest value of each tag
        self._warnings: tuple[str, ...] = ()
        self._diagnosis = Diagnosis(config)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> RoleProgress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def report(self) -> dict[str, Any]:
        """Returns the part of the status that is about progress. Callable from any thread."""
        now = time.monotonic()
        progress = {
            name: {"count": count.number, "age_seconds": now - count.changed_seconds, "has_changed": count.has_changed}
            for name, count in self._counts.copy().items()
        }
        return {"progress": progress, "warnings": list(self._warnings)}

    def look(self, now_seconds: float) -> None:
        """Reads the counts, and diagnoses the newest metrics."""
        for name, number in self._read_counts().items():
            before = self._counts.get(name)
            if before is None or number != before.number:
                self._counts[name] = _Count(number, now_seconds, before is not None)
                self._logged.setdefault(name, number)
        values = self._values  # not each is written every time
        for tag, value in self._read_metrics().items():
            if math.isfinite(value) and not tag.startswith(SHOWN):
                values[tag] = float(value)
        if "batches" in self._counts:  # the replay server's: each batch becomes an update
            per_second = values.get("replay/samples_per_second", 0.0) / self._config.learner.batch_size
            values |= {"learner/updates": self._counts["batches"].number, "charts/updates_per_second": per_second}
        learns = all(self._counts[name].has_changed for name in self._counts.keys() & {"updates", "batches"})
        self._warnings = self._diagnosis.warnings(now_seconds, values, learns, silent_seconds=0.0)

    def _run(self) -> None:
        # A local run shows the progress of all its roles in one table.
        is_shown = bool(os.environ.get(SUPERVISED)) or self._config.processes == "one"
        next_line = time.monotonic() + LINE_SECONDS
        while not self._closing.wait(LOOK_SECONDS):
            now = time.monotonic()
            self.look(now)
            if now >= next_line and not is_shown:
                next_line = now + LINE_SECONDS
                self._log_line()

    def _log_line(self) -> None:
        numbers = {name: count.number for name, count in self._counts.items()}
        text = ", ".join(f"{number:,} {name} ({number - self._logged[name]:+,})" for name, number in numbers.items())
        self._logged = numbers
        if text:
            _log.info("progress in a minute: %s", text)
