"""Real `main.py` processes for tests (Linux): every wait has a deadline, and no process survives its test."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

from apex_jax.process import SUPERVISED
from apex_jax.run.metrics import read_metrics
from tests.rigs.ports import free_port

ROOT = Path(__file__).parents[2]
MARK = "APEX_JAX_TEST_MARK"  # in the environment of a test's processes, which their children inherit
POLL_SECONDS = 0.05
PATIENCE_SECONDS = 240.0  # a hang, not a slow machine
LEAVING_SECONDS = 40.0  # 30 to save, and a busy machine

T = TypeVar("T")


class Program:
    """A `main.py` process whose output goes to files."""

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str], output: Path, lines: str = ""):
        """`lines`: of Python, run before `main.py` to cause a rare failure."""
        before = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{lines}\nimport main\nsys.exit(main.main())"
        self._output, self._errors = output.with_suffix(".out"), output.with_suffix(".err")
        with open(self._output, "wb") as out, open(self._errors, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *(["-c", before] if lines else [str(ROOT / "main.py")]), *arguments],
                stdin=subprocess.PIPE,  # with SUPERVISED: should the test itself be killed, this ends too
                stdout=out,
                stderr=err,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", SUPERVISED: "1", **environment},
            )

    @property
    def stdout(self) -> str:
        return self._output.read_text()

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    @property
    def is_running(self) -> bool:
        """Returns whether the process has neither ended nor been stopped by SIGSTOP."""
        state = _proc(self.process.pid, "stat").rpartition(b")")[2].split()[:1]
        return self.process.poll() is None and state != [b"T"]

    def send(self, signal_number: signal.Signals) -> None:
        self.process.send_signal(signal_number)

    def exit_code(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Waits for the end."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"has not ended after {seconds:g} s\n{self.stdout}\n{self.stderr}") from None

    def wait_until(self, condition: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
        """Polls until a condition is true while the process lives; returns its result."""

        def condition_of_a_living_process() -> T:
            code = self.process.poll()
            result = condition()
            assert result or code is None, f"ended with exit code {code}\n{self.stdout}\n{self.stderr}"
            return result

        return wait_until(condition_of_a_living_process, seconds)


class Programs:
    """Starts programs, tracks all their processes, and kills the remaining ones at the end."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._temporary = tempfile.TemporaryDirectory()  # a killed supervisor leaves the sockets of its links
        self._started: list[Program] = []

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        while living := self.living():  # a supervisor may be about to start one more
            for pid in living.values():
                _kill(pid)
        for program in self._started:
            program.process.wait()
            assert program.process.stdin is not None
            program.process.stdin.close()
        self._temporary.cleanup()

    def start(self, *arguments: str, lines: str = "", environment: dict[str, str] | None = None) -> Program:
        """`arguments`: of several values of a key the last one is passed on, so that a test can change a default."""
        environment = {MARK: self._mark, "TMPDIR": self._temporary.name, **(environment or {})}
        last = {text.partition("=")[0] if "=" in text else i: text for i, text in enumerate(arguments)}
        program = Program(tuple(last.values()), environment, self._folder / f"program-{len(self._started)}", lines)
        self._started.append(program)
        return program

    def living(self) -> dict[str, int]:
        """Returns the process id of every living process, by its --name or, without one, its --role."""
        mark = f"{MARK}={self._mark}".encode()
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return {_name(pid): pid for pid in pids if mark in _proc(pid, "environ")}


def catch(directory: Path, *arguments: str) -> tuple[str, ...]:
    """Returns the arguments of a run of Catch whose metrics come often."""
    given = f"run_directory={directory}", "processes=many", "metrics_interval_seconds=0.25"
    return ("--config", str(ROOT / "configs" / "catch.yaml"), *given, *arguments)


def values(directory: Path, name: str, tag: str) -> list[float]:
    """Returns the values of process `name` under a tag."""
    try:
        lines = read_metrics(directory / "metrics" / f"{name}.jsonl")
    except FileNotFoundError:
        return []
    return [line[tag] for line in lines if line.get(tag) is not None]


class Resources(NamedTuple):
    """What a process uses, at one moment or in the median."""

    memory_bytes: float
    fds: float
    threads: float


def resources_of(pid: int) -> Resources | None:
    """Returns what a process uses now; None if it has ended."""
    folder = Path("/proc", str(pid))
    try:
        memory_bytes = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Resources(memory_bytes, *(len(os.listdir(folder / name)) for name in ("fd", "task")))
    except (OSError, IndexError):
        return None


def log(directory: Path, name: str) -> str:
    """Returns what a process of a local run has logged."""
    path = directory / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def checkpoints(directory: Path) -> list[int]:
    """Returns the updates behind each checkpoint that is whole."""
    paths = (directory / "checkpoints").glob("*")
    return sorted(int(path.name) for path in paths if path.name.isdecimal())


def free_tcp_addresses() -> list[str]:
    """Returns `key=value` settings of the three links, with ports that are free now."""
    return [f"addresses.{link}=tcp://127.0.0.1:{free_port()}" for link in ("experience", "sampling", "weights")]


def wait_until(condition: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """Polls until a condition on files or processes is true; returns its result."""
    until, pause = time.monotonic() + seconds, threading.Event()
    while not (result := condition()):
        assert time.monotonic() < until, f"has not become true within {seconds:g} s"
        pause.wait(POLL_SECONDS)
    return result


def wait_for_the_end_of(*processes: Iterable[int]) -> None:
    """Waits until none of the processes, given by their ids, is running."""

    def is_running(pid: int) -> bool:
        return _proc(pid, "stat").rpartition(b")")[2].split()[:1] not in ([], [b"Z"])

    wait_until(lambda: not any(map(is_running, itertools.chain(*processes))))


def leave(programs: Iterable[Program]) -> None:
    """Sends SIGTERM to all processes, and checks that each ends in time and without an error.

    Whatever the network has done to them: their threads end, and so does their ZMQ context. One that is stopped is
    not asked.
    """
    asked = [program for program in programs if program.is_running]
    for program in asked:
        program.send(signal.SIGTERM)
    until = time.monotonic() + LEAVING_SECONDS
    for program in asked:
        code = program.exit_code(max(0.0, until - time.monotonic()))
        assert code == 128 + signal.SIGTERM, f"has left with exit code {code}\n{program.stderr}"
        assert "Traceback" not in program.stderr, program.stderr


def _proc(pid: int, file: str) -> bytes:
    try:
        return Path("/proc", str(pid), file).read_bytes()
    except OSError:  # ended meanwhile, or another user's
        return b""


def _name(pid: int) -> str:
    words = [word.decode() for word in _proc(pid, "cmdline").split(b"\0")]
    options = dict(itertools.pairwise(words))
    return options.get("--name") or options.get("--role") or "local"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
