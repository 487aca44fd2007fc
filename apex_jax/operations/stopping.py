"""The lines printed when the user stops a run: the acknowledgement, and how to stop sooner."""

from __future__ import annotations

import contextlib
import sys

STOPPING = "stopping: saving a checkpoint; Ctrl-C again to stop without"
STOPPING_AFTER_THE_END = "stopping: the checkpoint is saved; the last evaluation is cut short"


def acknowledge(line: str) -> None:
    """Prints a line on standard error, which may be closed."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
