"""What every worker process needs: when to stop, hosts that exist, a seed and a name of its own, and a log."""

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
from apex_jax.disk import lock
from apex_jax.errors import RunError
from apex_jax.transport.addresses import UnresolvedHost, resolve, split

SUPERVISED = "APEX_JAX_SUPERVISED"  # set by the local supervisor: standard input is a pipe that closes when it dies
FETCHED = "APEX_JAX_FETCHED"  # set by the local supervisor: the run directory has what storage.url had at the start
ORPHAN_SECONDS = 90.0  # that a worker may take to end once its supervisor has died
RESOLVE_SECONDS = 3.0  # that a name server may take
SAME_REQUEST_SECONDS = 3.0  # within which a second signal is the first once more, sent by another
SAME_PRESS_SECONDS = 0.5  # the same for Ctrl-C, which reaches the process that the user started and no role below it
CONNECTS = {"actor": ("experience", "weights"), "learner": ("sampling",), "evaluator": ("weights",)}  # role -> links


class StopSignal:
    """Set by SIGINT, SIGTERM, and the death of the supervisor or of a thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.signal_number = 0
        self._signal_seconds = 0.0  # when it came
        self._thread_died = False
        self._beat_seconds = time.monotonic()
        self.run_is_over = False  # the supervisor's word that the learner has ended the run
        self.on_second_signal: Callable[[], str] = lambda: ""  # see `install`

    def install(self) -> None:
        """Takes over SIGINT and SIGTERM, and what a thread dies of.

        A second signal ends the process at once, unless it is the first once more: what shuts a machine down sends
        SIGTERM to the local supervisor and to its roles, and the supervisor sends it on to these. Before that it calls
        `on_second_signal`, in the main thread between any two instructions: it must take no lock that this thread may
        hold, and write to no buffered stream. The line that it returns says what is lost, and is written to standard
        error.
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
        """Tells whether the worker should stop."""
        return self.signal_number != 0 or self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits until the worker should stop, at most `seconds`; returns whether it should."""
        return self._event.wait(seconds) or self.is_set()

    def beat(self) -> None:
        """Shows that the worker makes progress. Its loop calls this at each turn; the status page watches it."""
        self._beat_seconds = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._beat_seconds

    @property
    def exit_code(self) -> int:
        """0; by convention 128 + the signal that ended the process (130 Ctrl-C, 143 SIGTERM); 1 if a thread died."""
        return 128 + self.signal_number if self.signal_number else int(self._thread_died)

    def _on_dead_thread(self, args: threading.ExceptHookArgs) -> None:
        """A worker without one of its threads only seems to live: it ends, and whoever watches starts it again."""
        name = args.thread.name if args.thread is not None else "?"
        logging.getLogger(__name__).error("the thread %r died", name, exc_info=args.exc_value)
        self._thread_died = True
        self._event.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_number:
            is_press = number == signal.SIGINT and not os.environ.get(SUPERVISED)
            if now - self._signal_seconds > (SAME_PRESS_SECONDS if is_press else SAME_REQUEST_SECONDS):
                self._end_at_once(number)
            return
        self.signal_number = number  # not the event: the code that is interrupted here may hold its lock
        self._signal_seconds = now

    def _end_at_once(self, number: int) -> None:
        try:
            if lost := self.on_second_signal():
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{lost}\n".encode())
        finally:
            os._exit(128 + number)

    def _watch_supervisor(self) -> None:
        while os.read(sys.stdin.fileno(), 1):
            self.run_is_over = True
        self._event.set()
        time.sleep(ORPHAN_SECONDS)  # this thread does not keep the process alive
        os._exit(1)  # it hangs, and nobody is left to kill it


def check_hosts(role: str, config: Config) -> None:
    """Raises RunError where a link leads to a host whose name nobody knows; a host that is merely away is waited for.

    ZMQ would look for it for ever without a word. Whoever starts this process again also waits for a name to appear.
    """
    if role == "evaluator" and config.evaluator.checkpoint:
        return
    for link in CONNECTS.get(role, ()):
        address = getattr(config.addresses, link)
        if address.startswith("tcp://*:"):
            raise RunError(f"addresses.{link}={address}: * is for the server of that link; give its host name here")
        try:
            resolve(split(address), RESOLVE_SECONDS)
        except UnresolvedHost as error:
            raise RunError(f"addresses.{link}={address}: {error}; correct the name, or give an IP address") from None


@contextlib.contextmanager
def name_of_its_own(run_directory: str, name: str) -> Iterator[None]:
    """Holds the name of this process in its run directory; RunError if another process there has it.

    Two processes of one name would write into the same metrics. The lock ends with the process, however that ends.
    """
    path = Path(run_directory, "metrics", f".{name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError:  # then it cannot write metrics either, which says so and is no reason to end
        yield
        return
    try:
        if not lock(path.parent, descriptor):
            stem, _, number = name.rpartition("-")
            free = f"{stem}-{int(number) + 1}" if stem and number.isdecimal() else f"{name}-2"
            raise RunError(
                f"another process in {run_directory} is named {name}: give this one a name of its own, --name {free}"
            )
        yield
    finally:
        os.close(descriptor)


def process_rng(seed: int, *key: int) -> np.random.Generator:
    """Returns the random numbers of one process of the run: its role's number, and more where a role has several."""
    return np.random.default_rng(np.random.SeedSequence([seed, *key]))


def new_run_id() -> int:
    """Returns a random number that tells this process from any other, also from itself before a restart."""
    return random.SystemRandom().getrandbits(63)


def digest_of_run_id(run_id: int) -> str:
    """Returns what may be shown of a run id, which itself is a secret: with it another peer could act in its name."""
    return hashlib.sha256(b"run id %d" % run_id).hexdigest()[:16]


class _StandardError(logging.Handler):
    """Writes to `sys.stderr` as it is at each record: the live view replaces it, to print log lines above its panel."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record, as a whole."""
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # as each handler of the standard library
            self.handleError(record)


def start_log(name: str) -> logging.Logger:
    """Returns the process's log, on standard error: a line a fact, with the time and the role."""
    logging.basicConfig(
        format=f"%(asctime)s %(levelname)s {name}: %(message)s",
        datefmt="%H:%M:%S",
        level=logging.WARNING,
        handlers=[_StandardError()],
    )
    log = logging.getLogger("apex_jax")
    log.setLevel(logging.INFO)
    return log


ROLE_NUMBERS = {"learner": 0, "replay": 1, "actor": 2, "evaluator": 3}  # first key of `process_rng`
