"""What every worker process needs: when to stop, a seed of its own, a log, and the device it runs on."""

from __future__ import annotations

import logging
import os
import platform
import random
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from types import FrameType

import numpy as np

from apex_jax.config import Config
from apex_jax.errors import FatalError, RunError, first_line
from apex_jax.transport.addresses import UnresolvedHost, resolve, split

SUPERVISED = "APEX_JAX_SUPERVISED"  # set by the local supervisor: standard input is a pipe that closes when it dies
FETCHED = "APEX_JAX_FETCHED"  # set by the local supervisor: the run directory has what storage.url had at the start
OWN_GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
ORPHAN_SECONDS = 90.0  # that a worker may take to end once its supervisor has died
RESOLVE_SECONDS = 3.0  # that a name server may take
CONNECTS = {"actor": ("experience", "weights"), "learner": ("sampling",), "evaluator": ("weights",)}  # role -> links


class StopSignal:
    """Set by SIGINT, SIGTERM, and the death of the supervisor or of a thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.signal_number = 0
        self._thread_died = False
        self._asked_seconds = time.monotonic()
        self.run_is_over = False  # the supervisor's word that the learner has ended the run

    def install(self) -> None:
        """Takes over SIGINT and SIGTERM (a second one ends the process at once), and what a thread dies of."""
        threading.excepthook = self._on_dead_thread
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if os.environ.get(SUPERVISED):
            threading.Thread(target=self._watch_supervisor, daemon=True).start()

    def set(self) -> None:
        """Asks the worker to stop."""
        self._event.set()

    def is_set(self) -> bool:
        """Tells whether the worker should stop. Its loop asks at each turn, and shows by that that it is alive."""
        self._asked_seconds = time.monotonic()
        return self.signal_number != 0 or self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits until the worker should stop, at most `seconds`; returns whether it should."""
        return self._event.wait(seconds) or self.is_set()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the worker's loop last asked whether to stop."""
        return time.monotonic() - self._asked_seconds

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
        if self.signal_number:
            os._exit(128 + number)
        self.signal_number = number  # not the event: the code that is interrupted here may hold its lock

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


def choose_device(role: str, config: Config) -> None:
    """Tells JAX, before it is first used, what this role computes on; "auto" leaves it the best there is."""
    if role == "local":
        return  # computes nothing, and what it sets its roles would inherit
    device = {"learner": config.learner.device, "actor": config.actor.device}.get(role, "cpu")
    if device != "auto":
        os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[device]
    if role == "actor":  # may share the learner's GPU, most of whose memory JAX reserves for the first that asks
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def check_device(role: str, config: Config) -> None:
    """Raises FatalError where a GPU is asked for and there is none that JAX can use."""
    if {"learner": config.learner.device, "actor": config.actor.device}.get(role) != "gpu":
        return
    import jax  # not at the top: the device is chosen before JAX is imported

    try:
        jax.devices()
    except Exception as error:  # RuntimeError, or whatever the plugin that is missing is missed with
        what, fix = f"JAX finds no GPU ({first_line(error)})", "install requirements-gpu.txt and a driver, or set auto"
        raise FatalError(f"{role}.device=gpu: {what}; {fix}") from None


def keep_compiled_programs() -> None:
    """Has JAX keep what it compiles, before it is first used, so that a second start learns sooner.

    In the user's cache folder, apart for each kind of processor; JAX_COMPILATION_CACHE_DIR says another place. Without
    a place that can be written every start compiles anew.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache = caches / "apex_jax" / f"xla-{_processor_kind()}"
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return
    if os.access(cache, os.W_OK):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _processor_kind() -> str:
    """Returns a name for the instructions that this processor has: compiled programs may use all of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{zlib.crc32(features.encode()):08x}"


def device_memory_bytes() -> int:
    """Returns how much memory the device has that JAX chose: its own, or on a CPU what this process may use."""
    import jax  # not at the top: the device is chosen before JAX is imported

    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or _main_memory_bytes())


def _main_memory_bytes() -> int:
    """Returns the machine's memory, or the limit of this process's control group where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        [group] = [line[3:] for line in OWN_GROUP.read_text().splitlines() if line.startswith("0::")]
        limit = int(Path(f"{GROUPS}{group}", "memory.max").read_text())
    except (OSError, ValueError):  # there are none, or "max"
        return machine
    return min(machine, limit)


def process_rng(seed: int, *key: int) -> np.random.Generator:
    """Returns the random numbers of one process of the run: its role's number, and more where a role has several."""
    return np.random.default_rng(np.random.SeedSequence([seed, *key]))


def new_run_id() -> int:
    """Returns a random number that tells this process from any other, also from itself before a restart."""
    return random.SystemRandom().getrandbits(63)


def start_log(name: str) -> logging.Logger:
    """Returns the process's log, on standard error: a line a fact, with the time and the role."""
    logging.basicConfig(
        format=f"%(asctime)s %(levelname)s {name}: %(message)s", datefmt="%H:%M:%S", level=logging.WARNING
    )
    log = logging.getLogger("apex_jax")
    log.setLevel(logging.INFO)
    return log


ROLE_NUMBERS = {"learner": 0, "replay": 1, "actor": 2, "evaluator": 3}  # first key of `process_rng`
