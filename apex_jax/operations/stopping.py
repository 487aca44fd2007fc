"""The lines printed when the user stops a run: the acknowledgement, how to stop sooner, and what is lost then."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from apex_jax.run.checkpoint_files import checkpoint_steps

STOPPING = "stopping: saving a checkpoint; Ctrl-C again to stop without"
STOPPING_AFTER_THE_END = "stopping: the checkpoint is saved; the last evaluation is cut short"


def acknowledge(line: str) -> None:
    """Prints a line on standard error, which may be closed."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def lost_updates(run_directory: str, updates: int, is_saved: bool) -> str:
    """Returns a text about the updates that are lost if the run ends without saving.

    `updates`: the learner's last known number; `is_saved`: whether its last checkpoint has all of them.
    """
    saved = max(checkpoint_steps(Path(run_directory, "checkpoints")), default=0)
    if is_saved and saved:
        lost = f"no update is lost, the checkpoint at update {saved:,} is saved"
    elif saved:
        far = f" (the run was at about {updates:,})" if updates > saved else ""
        lost = f"the updates since the checkpoint at update {saved:,} are lost{far}"
    elif updates:
        lost = f"all {updates:,} updates are lost, since no checkpoint had been saved"
    else:
        lost = "no update had been made"
    return f"stopped at once: {lost}"


def lost_transitions(has_journal: bool) -> str:
    """Returns a text about the transitions that are lost if the run ends without saving."""
    if has_journal:
        return "no transition that the replay server has stored is lost"
    return "the replay's transitions are lost, as at each stop with replay.journal=false"
