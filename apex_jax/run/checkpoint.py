"""Checkpoints of the learner: saved in the background and committed atomically; the newest undamaged one is restored.

orbax writes and reads the files. Its CheckpointManager is not used because it lacks five guarantees of this module:
checksums of all files are written before the commit; saves succeed again after a failed one; a kill leaves no
checkpoint half deleted; damaged checkpoints do not count as kept ones; a process can read while another one writes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from apex_jax.host.disk import lock_file, set_damaged_aside, synchronize
from apex_jax.host.errors import first_line
from apex_jax.run.checkpoint_files import (
    FIX_OF_DIFFERENCE,
    CheckpointError,
    check_files,
    checkpoint_steps,
    write_checksums,
)
from apex_jax.run.identity import describe_differences, differences

_log = logging.getLogger(__name__)

FORMAT = 2


class Progress(NamedTuple):
    """The counters and identities that a checkpoint holds besides the arrays."""

    updates: int
    environment_steps: int  # of all actors
    elapsed_seconds: float  # learning time, summed over all starts of the run
    weights_version: int  # of the weights published last
    compatibility_key: str  # see `Config.checkpoint_compatibility_key`
    architecture: str  # digest of the network's leaves, see `transport.params_codec.architecture_of`
    run_identity: str = ""  # see `apex_jax.run.identity`
    replay_steps: tuple[tuple[str, int], ...] = ()  # id of each replay, and its count of environment steps


class Checkpointer:
    """Saves and restores `(state, Progress)` under `<run directory>/checkpoints/<updates>`.

    Subfolders whose names begin with a dot are checkpoints being written or deleted, which no process may read.
    """

    def __init__(self, run_directory: str, kept: int = 3, read_only: bool = False):
        """`kept`: number of newest checkpoints to keep. `read_only`: only restores; another process may save here.

        Raises CheckpointError, unless `read_only`, if the directory cannot be written or another process has locked it.
        """
        self.directory = Path(run_directory).absolute() / "checkpoints"
        self.failed_saves = 0
        self.failed_in_a_row = 0  # failed saves since the last successful one
        self.error: CheckpointError | None = None  # of the last save that ended; None if it succeeded
        self.saved_seconds = -math.inf  # time of the last commit by this process
        self.saved_updates = 0  # updates of the last checkpoint saved or restored
        self._kept = kept
        self._thread: threading.Thread | None = None
        _set_up_orbax()
        handlers = {"state": ocp.StandardCheckpointHandler(), "progress": ocp.JsonCheckpointHandler()}
        self._orbax = ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers))
        self._lock = None if read_only else self._take_directory()

    @property
    def steps(self) -> list[int]:
        """Number of updates of each checkpoint, ascending; damaged checkpoints are included."""
        return checkpoint_steps(self.directory)

    def save(self, state: Any, progress: Progress) -> None:
        """Starts a save; returns once `state` has been copied to the host, so that the next update may donate it.

        Waits for an earlier save first. A failure is logged, counted in `failed_saves` and stored in `error`.
        """
        assert self._lock is not None, "opened to be read, or closed"
        self._join()
        host_state = jax.tree.map(lambda leaf: np.array(leaf), state)
        arguments = (host_state, progress)
        self._thread = threading.Thread(target=self._save, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def close(self, patience_seconds: float | None = None) -> None:
        """Waits for the save in progress, then unlocks the directory.

        `patience_seconds`: longest wait, because a disk may hang; if the save still runs then, the directory
        stays locked. None = no limit.
        """
        self._join(patience_seconds)
        if self.is_saving:
            return
        self._orbax.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def restore_newest(
        self, like_state: Any, compatibility_key: str, architecture: str, updates: int | None = None
    ) -> tuple[Any, Progress] | None:
        """Returns the newest checkpoint that can be read; None if the directory has no checkpoint.

        `like_state`: a state of the same structure; the restored leaves are NumPy arrays. A damaged checkpoint is
        logged and skipped; unless `read_only`, it is renamed once an older one is restored. `updates`: restores only
        the checkpoint of this number of updates. Raises CheckpointError if the newest readable one has another
        configuration or a state of other leaves, or if all are damaged.
        """
        steps, damaged = self.steps, []
        if updates is not None and updates not in steps:
            choice = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{self.directory} has no checkpoint of {updates} updates; it has: {choice}")
        for step in reversed(steps if updates is None else [updates]):
            path = self.directory / str(step)
            try:
                check_files(path)
                progress = self._read_progress(path, compatibility_key, architecture)
                self._check_leaves(path, like_state)
                like = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), like_state)
                items = ocp.args.Composite(state=ocp.args.StandardRestore(like))
                state = self._orbax.restore(path, args=items)["state"]
            except CheckpointError:
                raise
            except Exception as error:  # orbax passes on any exception of its readers
                damaged.append(path)
                _log.warning("checkpoint %s is damaged, trying the one before: %s", path, first_line(error))
                continue
            if self._lock is not None:
                for path in damaged:  # otherwise they would count as newer checkpoints
                    set_damaged_aside(path)
            self.saved_updates = progress.updates
            return state, progress
        if updates is not None:
            choice = ", ".join(map(str, steps))
            raise CheckpointError(f"checkpoint {self.directory / str(updates)} cannot be read; there are: {choice}")
        if steps:
            raise CheckpointError(
                f"none of the checkpoints in {self.directory} can be read; move it away to start afresh"
            )
        return None

    def _take_directory(self) -> int:
        """Locks the directory while the returned descriptor is open; removes the incomplete checkpoints in it."""
        what = f"another learner saves in {self.directory}: stop it, or choose another run_directory"
        try:
            descriptor = lock_file(self.directory / ".lock", CheckpointError(what))
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot hold checkpoints: {error}; set run_directory") from error
        self._remove_halves()
        return descriptor

    def _remove_halves(self) -> None:
        """Removes incomplete checkpoints of killed or failed saves, and checkpoints renamed for deletion."""
        for path in self.directory.glob(".*-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _save(self, state: Any, progress: Progress) -> None:
        """Saves on the checkpoint thread, so that learning continues if the disk is slow or full."""
        try:
            if progress.updates not in self.steps:
                self._write(state, progress)
        except Exception as error:  # orbax passes on any exception of its writers
            self.failed_saves += 1
            self.failed_in_a_row += 1
            self.error = CheckpointError(
                f"checkpoint {self.directory}/{progress.updates} was not saved: {first_line(error)}"
            )
            _log.error("%s; training goes on, and it is tried again", self.error)
        else:
            if self.error is not None:
                _log.info("checkpoints are saved again")
            self.saved_updates = progress.updates
            self.saved_seconds = time.monotonic()
            self.failed_in_a_row = 0
            self.error = None
            self._set_old_aside()
        self._remove_halves()

    def _write(self, state: Any, progress: Progress) -> None:
        record = {"format": FORMAT, **progress._asdict()}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(record))
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_halves()
        half, whole = self.directory / f".saving-{progress.updates}", self.directory / str(progress.updates)
        self._orbax.save(half, args=items)
        write_checksums(half)
        os.rename(half, whole)  # commits the checkpoint
        synchronize(self.directory)

    def _set_old_aside(self) -> None:
        """Renames old checkpoints before their deletion, so that a kill during it leaves no checkpoint incomplete."""
        for step in self.steps[: -self._kept]:
            with contextlib.suppress(OSError):  # the next save tries it again
                os.rename(self.directory / str(step), self.directory / f".deleted-{step}")

    def _join(self, patience_seconds: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(patience_seconds)

    def _read_progress(self, path: Path, compatibility_key: str, architecture: str) -> Progress:
        """Returns a checkpoint's progress. Raises CheckpointError if its format, configuration or network differs."""
        record = self._orbax.restore(path, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))["progress"]
        where, fix = f"checkpoint {path}", FIX_OF_DIFFERENCE
        if (saved := record.get("format")) != FORMAT:
            raise CheckpointError(f"{where} has a different format: {saved}, not {FORMAT}; {fix}")
        made_with = str(record.get("compatibility_key"))
        if differences(made_with, compatibility_key):
            what = describe_differences(made_with, compatibility_key)
            raise CheckpointError(f"{where} has a different configuration: {what}; {fix}")
        if (saved := record.get("architecture")) != architecture:
            raise CheckpointError(f"{where} has a different network: {saved}, not {architecture}; {fix}")
        record["replay_steps"] = tuple((replay_id, steps) for replay_id, steps in record["replay_steps"])
        return Progress(**{name: record[name] for name in Progress._fields})

    def _check_leaves(self, path: Path, like: Any) -> None:
        """Raises CheckpointError if a leaf's shape or dtype differs; orbax ignores shapes and casts to the dtype."""
        tree = self._orbax.metadata(path).item_metadata["state"].tree
        saved, expected = (
            {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in ocp.tree.to_flat_dict(each, sep=".").items()}
            for each in (tree, like)
        )
        for name in expected | saved:
            if (was := saved.get(name, "absent")) != (now := expected.get(name, "absent")):
                what = f"has a different state: {name}: was {was}, now {now}"
                raise CheckpointError(f"checkpoint {path} {what}; {FIX_OF_DIFFERENCE}")


def _set_up_orbax() -> None:
    """Keeps orbax from copying arrays that nothing else modifies, and from logging errors that it also raises."""
    for orbax_log in ("absl", "asyncio"):
        logging.getLogger(orbax_log).setLevel(logging.CRITICAL)
    without_copy = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    ocp.type_handlers.register_type_handler(np.ndarray, without_copy, override=True)
