"""Updates the copy of a run on object storage in a thread, and fetches a run from it at the start."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from apex_jax.config import Config
from apex_jax.config.rules import requirement_of_storage_url
from apex_jax.host.errors import RunError, UsageError, short_repr
from apex_jax.host.program import NAME, Parser
from apex_jax.process import FETCHED, StopSignal
from apex_jax.run.identity import RunIdentity
from apex_jax.run.storage import SECTIONS, Section, Storage, StorageError, local_progress, progress_of

_log = logging.getLogger(__name__)

LAST_COPY_SECONDS = 20.0  # time limit of the last copy, at the end of the process


class StorageCopy:
    """A context that copies a section of the run at each interval, and once more at the end.

    A failure is logged once and counted, and the next copy tries again; training never waits. Does nothing if
    `storage.url` is empty.
    """

    def __init__(self, config: Config, section: Section, stop: StopSignal):
        self.failed = 0
        self._config = config
        self._section = section
        self._stop = stop
        self.errors: list[str] = []  # of the last copy
        self._storage: Storage | None = None
        self._copied_seconds = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)

    def __enter__(self) -> StorageCopy:
        """Fetches the section, see `fetch_missing`, unless the supervisor has done so. Raises RunError."""
        if self._config.storage.url:
            # The supervisor has already fetched the run; a role that restarts must not depend on the storage.
            sections = [] if os.environ.get(FETCHED) else [self._section]
            self._storage = fetch_missing(self._config, sections, self._stop)
            if not self._stop.is_set():
                self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._thread.is_alive():  # after an error the process ends at once; the previous copy stays
            self._closing.set()
            until = time.monotonic() + LAST_COPY_SECONDS
            while self._thread.is_alive() and time.monotonic() < until:
                self._stop.beat()
                self._thread.join(0.1)
            if self._thread.is_alive():
                _log.warning("the last copy to %s took too long: the previous copy stays", self._config.storage.url)

    def metrics(self) -> dict[str, float]:
        """Returns values under the tags of `apex_jax.run.metrics.TAGS`."""
        if self._storage is None:
            return {}
        age = time.monotonic() - self._copied_seconds
        return {"storage/failed_copies": self.failed, "storage/copy_age_seconds": age}

    def _run(self) -> None:
        while not self._closing.wait(self._config.storage.interval_seconds):
            self._push()
        self._push()

    def _push(self) -> None:
        assert self._storage is not None
        started = time.monotonic()
        try:
            self._storage.push(self._section, Path(self._config.directory))
        except RunError as error:
            self.failed += 1
            if not self.errors:
                _log.error("cannot copy the run (logged once, retried at each interval): %s", error)
            self.errors = [f"cannot copy the run: {error}"]
            return
        if self.errors:
            _log.info("copying the run works again")
        self.errors = []
        self._copied_seconds = started


def fetch_missing(config: Config, sections: Sequence[Section], stop: StopSignal) -> Storage:
    """Fetches the sections that the run directory lacks, or newer checkpoints of the same run. Returns the storage.

    Newer checkpoints may come from a replaced machine that was still saving; the run continues from them.
    Raises RunError if the storage cannot be read, or holds another run that is ahead, which a start would overwrite.
    """

    def is_cancelled() -> bool:
        stop.beat()
        return stop.is_set()

    storage, directory = Storage(config.storage.url), Path(config.directory)
    for section in sections:
        if (local := local_progress(section, directory)) is not None:
            if section != "learner":
                continue
            copy = storage.copy(section)
            if (remote := progress_of(section, copy.files)) is None or remote <= local:
                continue
            if not copy.identity or copy.identity != RunIdentity(str(directory)).name:
                what = f"a checkpoint at {remote} updates, {directory} only one at {local}"
                fix = "fetch it into an empty run_directory, or choose another storage.url"
                raise StorageError(f"storage.url={storage.url} holds {what}: {fix}")
            _log.warning("%s is at %d updates, its copy at %d: the run goes on from the copy", directory, local, remote)
        if (num_bytes := storage.pull(section, directory, is_cancelled)) is not None:
            _log.info("fetched the %s of the run from %s: %.1f MB", section, storage.url, num_bytes / 1e6)
    return storage


# The commands `storage push RUN URL` and `storage pull URL RUN`: copy a run to object storage and back ---------------


MEANINGS = {"run": "run directory, such as runs/Pong-v5-1", "url": "place of the copy: s3://bucket/prefix, or a folder"}


def run(arguments: Sequence[str]) -> int:
    """Runs the command; `arguments`: after "storage". Returns the exit code. Raises UsageError, RunError."""
    options = _parser().parse_args(arguments)
    if requirement := requirement_of_storage_url(options.url):
        raise UsageError(f"storage: URL {short_repr(options.url) or repr('')}: {requirement}")
    directory, storage = Path(options.run), Storage(options.url)
    held = [section for section in SECTIONS if local_progress(section, directory) is not None]
    if options.action == "push" and "learner" not in held:
        raise UsageError(f"{short_repr(directory)}: holds no checkpoint; give the directory of a run")
    if options.action == "pull" and held:
        raise UsageError(f"{short_repr(directory)}: holds a run already; give another directory")
    copy = storage.push if options.action == "push" else storage.pull
    found = False
    for section in SECTIONS:
        if (num_bytes := copy(section, directory)) is not None:
            print(f"{section}: {num_bytes / 1e6:,.1f} MB transferred")
            found = True
    if not found:
        raise RunError(f"{storage.url}: there is no copy of a run; check the URL")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "storage",
        description="Copies a run to object storage, or back. Only what is new is transferred. Credentials and"
        " endpoint come from boto's usual places (AWS_PROFILE, AWS_ENDPOINT_URL, the machine's role).",
        epilog=f"example: {NAME} storage push runs/Pong-v5-1 s3://bucket/pong",
    )
    actions = parser.add_subparsers(dest="action", required=True, parser_class=Parser, metavar="push | pull")
    for action, order in (("push", ("run", "url")), ("pull", ("url", "run"))):
        sub = actions.add_parser(action, help=f"{action} {' '.join(order).upper()}")
        for name in order:
            sub.add_argument(name, metavar=name.upper(), help=MEANINGS[name])
    return parser
