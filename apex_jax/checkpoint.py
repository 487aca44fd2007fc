"""Checkpoints of the learner: saved in the background, committed whole or not at all, newest sound one restored."""

from __future__ import annotations

import json
import logging
import os
import warnings
import zlib
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
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} cannot hold checkpoints: it is a file; set run_directory")
        self._damaged: set[int] = set()
        for orbax_log in ("absl", "asyncio"):  # what fails comes back as an exception, too
            logging.getLogger(orbax_log).setLevel(logging.CRITICAL)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=kept,
            # A directory that cannot be made fails at once; made asynchronously, it leaves threads that wait 5 minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
        )
        try:
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot hold checkpoints: {error}; set run_directory") from error

    def save(self, state: Any, progress: Progress) -> None:
        """Starts saving; returns once `state` has been copied to the host, so that the next update may donate it.

        Raises CheckpointError if the save before this one failed.
        """
        host_state = jax.tree.map(lambda leaf: np.array(leaf), state)
        record = {"format": FORMAT, "state_crc": _crc_of_state(host_state), **progress._asdict()}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(host_state),
            progress=ocp.args.JsonSave({**record, "crc": _crc_of_record(record)}),
        )
        try:
            self._manager.check_for_errors()
            if progress.updates in self._damaged:
                self._manager.delete(progress.updates)
                self._damaged.remove(progress.updates)
            if progress.updates not in self._manager.all_steps():
                self._manager.save(progress.updates, args=items, force=True)
        except Exception as error:  # orbax raises whatever its writers raise, and training must outlive a full disk
            raise CheckpointError(f"checkpoint {self.directory}/{progress.updates} was not saved: {error}") from error

    def restore_newest(self, like_state: Any, agreement: str, architecture: str) -> tuple[Any, Progress] | None:
        """Returns the newest checkpoint that can be read, None where there is none at all.

        `like_state`: a state of the same structure; the leaves that come back are NumPy arrays. A damaged checkpoint is
        said once and passed over; one of another configuration, or damage to all, is a CheckpointError.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            try:
                record = self._read_record(step)
            except Exception as error:  # orbax raises whatever its readers of a damaged file raise
                self._pass_over(step, error)
                continue
            self._check(step, record, agreement, architecture)
            progress = Progress(**{name: record[name] for name in Progress._fields})
            try:
                return self._restore_state(step, like_state, record["state_crc"]), progress
            except Exception as error:
                self._pass_over(step, error)
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
        except Exception as error:
            raise CheckpointError(f"the last checkpoint in {self.directory} was not saved: {error}") from error

    def _read_record(self, step: int) -> dict[str, Any]:
        restored = self._manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))
        record = dict(restored["progress"])
        if record.pop("crc") != _crc_of_record(record):
            raise ValueError("the checksum of its progress is wrong")
        return record

    def _check(self, step: int, record: dict[str, Any], agreement: str, architecture: str) -> None:
        for what, name, ours in (
            ("format", "format", FORMAT),
            ("configuration", "agreement", agreement),
            ("network", "architecture", architecture),
        ):
            if (saved := record[name]) != ours:
                raise CheckpointError(
                    f"checkpoint {self.directory}/{step} has another {what}: {saved}, not {ours};"
                    " use the configuration it was made with, or another run_directory"
                )

    def _restore_state(self, step: int, like_state: Any, crc: int) -> Any:
        like = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like_state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            items = ocp.args.Composite(state=ocp.args.StandardRestore(like))
            state = self._manager.restore(step, args=items)["state"]
        if _crc_of_state(state) != crc:  # orbax does not see every flipped bit
            raise ValueError("the checksum of its state is wrong")
        return state

    def _pass_over(self, step: int, error: Exception) -> None:
        self._damaged.add(step)
        reason = str(error).strip().splitlines() or [type(error).__name__]
        _log.warning(
            "checkpoint %s is damaged, trying the one before: %s", os.fspath(self.directory / str(step)), reason[0]
        )


def _crc_of_state(state: Any) -> int:
    crc = 0
    for leaf in jax.tree.leaves(state):
        crc = zlib.crc32(np.ascontiguousarray(leaf).data, crc)
    return crc


def _crc_of_record(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
