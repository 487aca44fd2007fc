"""The process of one role of a local run: its start, its restarts, and the error at the end of its log."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from apex_jax.host.disk import open_regular, read_regular
from apex_jax.host.errors import FatalError, RunError
from apex_jax.host.program import command
from apex_jax.process import FETCHED, SUPERVISED
from apex_jax.workers.role import DESCRIBED

COMMAND = command()
LOG_TAIL_LINES = 8
_NOTE_OF_JAX = re.compile(r"-+$|For simplicity, JAX has removed")  # after the message of its exceptions
_OF_THE_LOG = re.compile(r"\d\d:\d\d:\d\d [A-Z]+ ")


@dataclass
class RoleProcess:
    """One role of the run, its process, and the counters of its restarts."""

    role: str
    name: str
    log_path: Path
    arguments: tuple[str, ...] = ()  # beside those that all roles have
    process: subprocess.Popen[bytes] | None = None
    started_seconds: float = 0.0
    restarts: int = 0  # consecutive
    restart_at: float = 0.0
    last_error: str = ""  # error line of its last failure
    fault: str = ""  # reason why the supervisor killed it
    fault_seconds: float = 0.0  # duration of the fault when it was killed
    state: str = "starting"

    def start(self, arguments: list[str]) -> None:
        """Starts the process in a new session, so that only the supervisor receives Ctrl-C."""
        self.close_pipe()
        command = [*COMMAND, "--role", self.role, "--name", self.name, *arguments, *self.arguments]
        with open(open_regular(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # closes when the supervisor dies, which ends the role
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, SUPERVISED: "1", FETCHED: "1", DESCRIBED: str(self.log_path.parent)},
            )
        self.started_seconds = time.monotonic()
        self.fault, self.fault_seconds = "", 0.0
        self.state = f"restarted {self.restarts}x" if self.restarts else "starting"

    def exit_code(self) -> int | None:
        """Returns the exit code of a process that has ended, else None."""
        return self.process.poll() if self.process is not None else None

    def error_line(self) -> str:
        """Returns the error line, or that of a traceback, with which the role ended; empty if it was killed."""
        has_said_why = self.exit_code() in (RunError.exit_code, FatalError.exit_code)
        lines = [line for line in self._log()[-4:] if not _NOTE_OF_JAX.match(line)]
        return "".join(line for line in lines[-1:] if has_said_why and not _OF_THE_LOG.match(line))

    def log_tail(self) -> str:
        """Returns the last lines of the role's log, indented."""
        return "\n".join(f"  {line}" for line in self._log()[-LOG_TAIL_LINES:])

    def _log(self) -> list[str]:
        try:
            return read_regular(self.log_path).decode(errors="replace").splitlines()
        except OSError:  # a user may delete logs
            return []

    def send_end_of_run(self) -> None:
        """Writes a line to the role's stdin, see `StopSignal.run_is_over`."""
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def close_pipe(self) -> None:
        """Closes the pipe to a process that has ended."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
