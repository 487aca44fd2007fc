"""Parts common to all processes: a stop signal, a check of hosts, random numbers, a unique name and a log."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np

from apex_jax.config import Config
from apex_jax.host.disk import lock_file
from apex_jax.host.errors import RunError, printable
from apex_jax.transport.addresses import resolve, split

SUPERVISED = "APEX_JAX_SUPERVISED"  # set by the local supervisor: stdin is a pipe that closes when the supervisor dies
FETCHED = "APEX_JAX_FETCHED"  # set by the local supervisor, which has already fetched the copy at storage.url
ORPHAN_SECONDS = 90.0  # maximum time in which a worker ends after its supervisor has died
SAME_REQUEST_SECONDS = 3.0  # a second signal within this time is a repetition of the first, by another sender
SAME_PRESS_SECONDS = 0.5  # this time for Ctrl-C, which reaches only the process that the user started
STOPPING = "stopping: saving a checkpoint; Ctrl-C again to stop without"
STOPPING_AFTER_THE_END = "stopping: the checkpoint is saved; the last evaluation is cut short"
CONNECTS = {"actor": ("experience", "weights"), "learner": ("sampling",), "evaluator": ("weights",)}  # role -> links


class StopSignal:
    """Set by SIGINT, SIGTERM, and the death of the supervisor or of a thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.signal_number = 0
        self._signal_seconds = 0.0  # time of the first signal
        self._thread_died = False
        self._beat_seconds = time.monotonic()
        self.has_begun = False  # the worker's loop has iterated once
        self.run_is_over = False  # set once the supervisor reports that the learner has ended the run
        self.on_second_signal: Callable[[], None] = lambda: None  # see `install`

    def install(self) -> None:
        """Installs the handlers of SIGINT, of SIGTERM and of uncaught exceptions in threads.

        A second signal ends the process at once, unless it repeats the first: at the shutdown of a machine, the local
        supervisor and its roles receive SIGTERM, and the supervisor sends it to the roles too. Before the process ends,
        the handler calls `on_second_signal`, in the main thread between any two instructions: it must not take a lock
        that the main thread may hold, nor write to a buffered stream.
        """
        threading.excepthook = self._on_dead_thread
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if os.environ.get(SUPERVISED):
            threading.Thread(target=self._watch_supervisor, daemon=True).start()

    def set(self) -> None:
        """Asks the worker to stop."""
        self._event.set()

    def is_set(self) -> bool:
        """Returns whether the worker should stop."""
        return self.signal_number != 0 or self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits until the worker should stop, at most `seconds`; returns whether it should."""
        return self._event.wait(seconds) or self.is_set()

    def beat(self) -> None:
        """Records progress, which the report shows. The worker calls this in each iteration of its loop."""
        self._beat_seconds, self.has_begun = time.monotonic(), True

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._beat_seconds

    @property
    def exit_code(self) -> int:
        """0; by convention 128 + the signal that ended the process (130 Ctrl-C, 143 SIGTERM); 1 if a thread died."""
        return 128 + self.signal_number if self.signal_number else int(self._thread_died)

    def _on_dead_thread(self, args: threading.ExceptHookArgs) -> None:
        """Stops the worker: without one of its threads it would run and do nothing. Its supervisor restarts it."""
        name = args.thread.name if args.thread is not None else "?"
        logging.getLogger(__name__).error("the thread %r died", name, exc_info=args.exc_value)
        self._thread_died = True
        self._event.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_number:
            is_press = number == signal.SIGINT and not os.environ.get(SUPERVISED)
            if now - self._signal_seconds > (SAME_PRESS_SECONDS if is_press else SAME_REQUEST_SECONDS):
                try:
                    self.on_second_signal()
                finally:
                    os._exit(128 + number)
            return
        self.signal_number = number  # not `_event.set()`: the interrupted code may hold its lock
        self._signal_seconds = now

    def _watch_supervisor(self) -> None:
        while os.read(sys.stdin.fileno(), 1):
            self.run_is_over = True
        self._event.set()
        time.sleep(ORPHAN_SECONDS)  # a worker that ends in time does not wait for this daemon thread
        os._exit(1)  # the worker hangs, and no supervisor is left to kill it


def acknowledge(line: str) -> None:
    """Prints a line for a user who stops a run on standard error, which may be closed."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def check_hosts(role: str, config: Config) -> None:
    """Raises RunError if the host name of a link cannot be resolved; an unreachable host is no error here.

    ZMQ would retry such a name forever without an error. Each restart by a supervisor also retries the name.
    """
    if role == "evaluator" and config.evaluator.checkpoint:
        return
    for link in CONNECTS.get(role, ()):
        address = getattr(config.addresses, link)
        if address.startswith("tcp://*:"):
            raise RunError(f"addresses.{link}={address}: * is for the server of that link; give its host name here")
        try:
            resolve(split(address))
        except RunError as error:
            raise RunError(f"addresses.{link}={address}: {error}; correct the name, or give an IP address") from None


@contextlib.contextmanager
def lock_name(run_directory: str, name: str) -> Iterator[None]:
    """Locks the name of this process in its run directory; raises RunError if another process there has locked it.

    Two processes with one name would write to the same metrics. The lock is released even if the process is killed.
    """
    path = Path(run_directory, "metrics", f".{name}.lock")
    what = f"another process in {run_directory} is named {name}: give this one a name of its own with --name"
    try:
        descriptor = lock_file(path, RunError(what))
    except OSError:  # metrics cannot be written either: MetricsWriter logs that, and the run goes on
        yield
        return
    with open(descriptor):
        yield


def process_rng(seed: int, *key: int) -> np.random.Generator:
    """Returns the random generator of a process.

    `key`: the number of its role in ROLE_NUMBERS; for an actor, followed by its actor number.
    """
    return np.random.default_rng(np.random.SeedSequence([seed, *key]))


def new_peer_id() -> int:
    """Returns a random number that identifies this process; a restarted process gets another."""
    return random.SystemRandom().getrandbits(63)


def digest_of_peer_id(peer_id: int) -> str:
    """Returns a digest of a peer id, for display. The id itself is secret: with it, others could act as the process."""
    return hashlib.sha256(b"peer id %d" % peer_id).hexdigest()[:16]


class _StandardError(logging.StreamHandler):
    """Writes to the current `sys.stderr`, which the live view replaces to print log lines above its panel."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record in one call."""
        self.stream = sys.stderr
        super().emit(record)


class _OneLine(logging.Formatter):
    """Formats an event without the control characters that a text of a file or peer may have."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line of an event."""
        record.message = printable(record.message)
        return super().formatMessage(record)


def start_log(name: str) -> logging.Logger:
    """Returns the process's log: one line per event on standard error, with the time and the process's name."""
    handler = _StandardError()
    handler.setFormatter(_OneLine(f"%(asctime)s %(levelname)s {name}: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log = logging.getLogger("apex_jax")
    log.setLevel(logging.INFO)
    return log


ROLE_NUMBERS = {"learner": 0, "replay": 1, "actor": 2, "evaluator": 3}  # first key of `process_rng`
