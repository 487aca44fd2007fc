"""Checkpoints of the learner: saved in the background, committed whole or not at all, newest sound one restored."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from apex_jax.errors import RunError

_log = logging.getLogger(__name__)

FORMAT = 1


class Progress(NamedTuple):
    """Where the run stands, beside the arrays."""

    updates: int
    environment_steps: int  # of all actors
    elapsed_seconds: float  # of learning, over all starts of the run
    weights_version: int  # newest sent
    agreement: str  # of the configuration, see `Config.agreement`
    architecture: str  # digest of the network's leaves, see `transport.codec.architecture_of`


class CheckpointError(RunError):
    """A checkpoint that is there cannot be used; the message says which and why."""


class Checkpointer:
    """Saves and restores `(state, Progress)` under `<run directory>/checkpoints/<updates>`."""

    def __init__(self, run_directory: str, kept: int = 3, read_only: bool = False):
        """`kept`: newest checkpoints that are not deleted. `read_only`: another process may be saving here."""
        self.directory = Path(run_directory).absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(
            max_to_keep=kept,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, state: Any, progress: Progress) -> None:
        """Starts saving; returns once `state` has been copied to the host, so that the next update may donate it.

        Raises CheckpointError if the save before this one failed.
        """
        host_state = jax.tree.map(lambda leaf: np.array(leaf), state)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(host_state),
            progress=ocp.args.JsonSave({"format": FORMAT, **progress._asdict()}),
        )
        try:
            self._manager.check_for_errors()
            if progress.updates not in self._manager.all_steps():
                self._manager.save(progress.updates, args=items, force=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {self.directory}/{progress.updates} was not saved: {error}") from error

    def restore_newest(self, like_state: Any, agreement: str, architecture: str) -> tuple[Any, Progress] | None:
        """Returns the newest checkpoint that can be read, None where there is none at all.

        `like_state`: a state of the same structure; the leaves that come back are NumPy arrays. A damaged checkpoint is
        said once and passed over; one of another configuration, or damage to all, is a CheckpointError.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            try:
                restored = self._manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))
                fields = dict(restored["progress"])
                version, progress = fields.pop("format"), Progress(**fields)
            except Exception as error:  # orbax raises whatever its readers of a damaged file raise
                self._warn(step, error)
                continue
            self._check(step, version, progress, agreement, architecture)
            try:
                return self._restore_state(step, like_state), progress
            except Exception as error:
                self._warn(step, error)
        if steps:
            raise CheckpointError(
                f"none of the checkpoints in {self.directory} can be read; move it away to start afresh"
            )
        return None

    def close(self) -> None:
        """Waits until everything is saved. Raises CheckpointError if it was not."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self._manager.close()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the last checkpoint in {self.directory} was not saved: {error}") from error

    def _check(self, step: int, version: int, progress: Progress, agreement: str, architecture: str) -> None:
        for what, saved, ours in (
            ("format", version, FORMAT),
            ("configuration", progress.agreement, agreement),
            ("network", progress.architecture, architecture),
        ):
            if saved != ours:
                raise CheckpointError(
                    f"checkpoint {self.directory}/{step} has another {what}: {saved}, not {ours};"
                    " use the configuration it was made with, or another run_directory"
                )

    def _restore_state(self, step: int, like_state: Any) -> Any:
        like = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like_state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            items = ocp.args.Composite(state=ocp.args.StandardRestore(like))
            return self._manager.restore(step, args=items)["state"]

    def _warn(self, step: int, error: Exception) -> None:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        _log.warning(
            "checkpoint %s is damaged, trying the one before: %s", os.fspath(self.directory / str(step)), reason[0]
        )
