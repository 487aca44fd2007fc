"""A whole run on this machine: starts every role as a process, supervises them, shows progress and cleans up."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from apex_jax.config import AddressConfig, Config
from apex_jax.config.load import to_yaml, yaml_text
from apex_jax.device import actor_processes, has_gpu
from apex_jax.environments.environment import can_render, log_reading
from apex_jax.host.disk import lock_file, open_regular, read_regular, write_durably
from apex_jax.host.errors import FatalError, RunError, UsageError, printable
from apex_jax.host.machine import untried_packages, usable_cores
from apex_jax.host.program import NAME, command
from apex_jax.operations.live_view import LiveView, final_summary, finished_summary
from apex_jax.operations.pages import RunPage
from apex_jax.operations.process_report import ProcessReport
from apex_jax.operations.progress import ProgressReader, RunProgress
from apex_jax.operations.records import RoleWatch, remove_reports
from apex_jax.operations.storage_copy import LAST_COPY_SECONDS, fetch_missing
from apex_jax.process import FETCHED, STOPPING, STOPPING_AFTER_THE_END, SUPERVISED, StopSignal, acknowledge
from apex_jax.replay.header import check_journal
from apex_jax.replay.rate_limiter import make_limiter
from apex_jax.run.checkpoint_files import checkpoint_steps
from apex_jax.run.environment_spec import record_environment_spec
from apex_jax.run.provenance import changed_settings, check_resumable, playing_arguments, record_start
from apex_jax.transport.sockets import LocalLinks
from apex_jax.types import EnvironmentSpec
from apex_jax.workers.recording import check_video, draw_curves, film_in_simulator
from apex_jax.workers.role import DESCRIBED, checked_description

_log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
FIRST_DELAY_SECONDS = 1.0  # backoff before a role is restarted; doubled each time
MAX_RESTARTS = 5  # consecutive restarts of one role
STEADY_SECONDS = 120.0  # without a fault, after which a role's restarts are counted from 0 again
LONGEST_HEAD_START_SECONDS = 10.0  # before the evaluator starts; it ends sooner, once the other roles have reported
KILL_SECONDS = 10.0  # from SIGTERM to SIGKILL; on two busy cores an actor needs up to five
SAVE_SECONDS = 35.0  # from SIGTERM to SIGKILL, for roles that save their state; the learner gives up after 30
MOST_CHARACTERS = 300  # of an error in a warning
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")  # in an error, which differs by it from one start to the next


class LocalRun:
    """The processes of one run on this machine."""

    def __init__(
        self,
        config: Config,
        environment_spec: EnvironmentSpec,
        addresses: AddressConfig,
        stop: StopSignal,
        page: RunPage,
    ):
        """`config`: with an existing run directory; `environment_spec`: of the run's task, passed on to the roles;
        `addresses`: unique to this run; `page`: receives the progress.
        """
        self._config, self._environment_spec = config, environment_spec
        self._stop = stop
        self._page = page
        self._directory = Path(config.directory)
        (self._directory / "logs").mkdir(exist_ok=True)
        config_path = self._directory / "logs" / "config.yaml"  # the learner writes the run's own config.yaml
        write_durably(config_path, to_yaml(config))
        record_environment_spec(config_path.parent, environment_spec)
        links = [f"addresses.{link}={yaml_text(of)}" for link, of in asdict(addresses).items()]
        self._arguments = ["--config", str(config_path), *links]
        self._roles = [
            self._new_role("replay", "replay"),
            self._new_role("learner", "learner"),
            *(self._new_role("actor", f"actor-{i}") for i in range(config.actor.processes)),
            self._new_role("evaluator", "evaluator"),
        ]
        self._watch = RoleWatch(config.directory)
        self._has_learned = False  # the learner has ended the run
        self._view: LiveView | None = None

    def run(self) -> None:
        """Runs until the run's limit or a signal. Raises RunError if a role cannot be kept alive."""
        reader = ProgressReader(str(self._directory), self._config)
        try:
            view = self._view = LiveView(self._config, sys.stdout, page_address=self._page.address)
            with contextlib.closing(view):
                for role in self._roles[:-1]:
                    self._start(role)
                while not self._stop.wait(TICK_SECONDS) and not self._is_over():
                    self._stop.beat()
                    self._keep_alive()
                    progress = self._with_roles(reader.read())
                    view.update(progress)
                    self._page.update(progress)
                view.update(self._with_roles(reader.read()))  # the score first: film, curves and report come after it
        finally:
            if self._stop.signal_number:
                acknowledge(STOPPING_AFTER_THE_END if self._has_learned else STOPPING)
            self._end_processes()  # within SAME_REQUEST_SECONDS of a signal that the roles received, too
        draw_curves(self._directory, self._config.environment.task)
        progress = replace(reader.read(), film=film_in_simulator(self._config, self._stop))
        self._page.finish(progress)
        print(final_summary(progress, self._config, can_render(self._config, self._environment_spec)), flush=True)
        for role in self._roles:
            if role.role in ("learner", "replay") and (error := role.error_line()):
                # The updates or transitions that it failed to save are lost.
                what = f"{role.name} ended with exit code {role.exit_code()}, see {role.log_path}"
                raise RunError(f"{what}: {error.removeprefix(RunError.prefix).removeprefix(FatalError.prefix)}")

    def end_at_once(self) -> None:
        """Kills all processes, after a second signal, in a handler that may interrupt `run` anywhere."""
        for process in [role.process for role in self._roles if role.process is not None]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that its environments have started
        with contextlib.suppress(Exception):  # the terminal does not respond, or a write was interrupted
            if self._view is not None:
                self._view.close()

    def report(self) -> dict[str, Any]:
        """Returns the state and the newest report of each role. Callable from any thread."""
        states = {role.name: role.state for role in self._roles}
        others = ", ".join(f"{name} {state}" for name, state in states.items() if state != "running")
        reports = self._watch.reports.copy()
        return {"finished": self._has_learned, "roles": states, "reports": reports, "does": others or "all roles run"}

    def _new_role(self, role: str, name: str) -> RoleProcess:
        return RoleProcess(role, name, self._directory / "logs" / f"{name}.log")

    def _start(self, role: RoleProcess) -> None:
        self._end_processes_of_environments([role])
        role.start(self._arguments)
        self._watch.started(role.name)

    def _with_roles(self, progress: RunProgress) -> RunProgress:
        """Adds the supervisor's state (phase and roles) to the progress read from files."""
        if self._has_learned:  # the stalled progress is then expected
            progress = replace(progress, phase="finishing", warnings=())
        return replace(progress, roles={role.name: role.state for role in self._roles})

    def _is_over(self) -> bool:
        """Returns whether the learner has ended the run and the evaluator has ended, killed by the watch if it hung."""
        _, learner, *_, evaluator = self._roles
        if not self._has_learned and learner.exit_code() == 0:
            self._has_learned = True
            if evaluator.process is None or evaluator.exit_code():
                self._restart(evaluator)  # at once: its final evaluation is the result of the run
            evaluator.send_end_of_run()
        code = evaluator.exit_code()
        if not self._has_learned or code is None:
            return False
        if code != 0:
            play = playing_arguments(self._directory, self._config)
            text = "the last evaluation failed with exit code %s, see %s; to repeat it: %s %s"
            _log.warning(text, code, evaluator.log_path, NAME, play)
        return True

    def _keep_alive(self) -> None:
        self._watch.look()
        *others, evaluator = self._roles
        if evaluator.process is None:  # the evaluator's imports would take the cores that the first update needs
            waited = time.monotonic() - others[-1].started_seconds
            if waited > LONGEST_HEAD_START_SECONDS or all(role.name in self._watch.reports for role in others):
                self._start(evaluator)
        for role in self._roles:
            code = role.exit_code()
            if role.state == "starting" and role.name in self._watch.reports:
                role.state = "running"
            if code is None and not role.fault:
                role.fault, role.fault_seconds = self._watch.fault(role.name)
                if role.fault and role.process is not None:
                    self._watch.ended(role.name)
                    role.process.kill()  # restarted as after a crash
            if code == 0:
                role.state = "done"  # it ended because the run is over
                self._watch.ended(role.name)
            if not code or self._has_learned:
                continue
            now = time.monotonic()
            if role.restart_at == 0.0:
                self._schedule_restart(role, code, now)
            elif now >= role.restart_at:
                self._restart(role)

    def _restart(self, role: RoleProcess) -> None:
        """Restarts a role. With a learner that failed while ending the run, also restarts the roles that have ended."""
        role.restart_at = 0.0
        self._start(role)
        for other in self._roles:
            if role.role == "learner" and other is not role and other.exit_code() == 0:
                self._start(other)

    def _schedule_restart(self, role: RoleProcess, code: int, now: float) -> None:
        well_seconds = now - role.started_seconds - role.fault_seconds
        role.restarts = 1 if well_seconds > STEADY_SECONDS else role.restarts + 1
        error_before, role.last_error = role.last_error, role.error_line()
        before, now_said = (_NUMBER.sub("", line) for line in (error_before, role.last_error))
        is_in_vain = role.restarts > 1 and now_said != "" and now_said == before
        is_final = code in (UsageError.exit_code, FatalError.exit_code)
        self._watch.ended(role.name)
        if is_final or is_in_vain or role.restarts > MAX_RESTARTS:
            what = f"failed {role.restarts} times in a row"
            if is_final:
                what = "refused its configuration" if code == UsageError.exit_code else "cannot go on"
            raise RunError(f"{role.name} {what} (exit code {code}); the end of {role.log_path}:\n{role.log_tail()}")
        delay = FIRST_DELAY_SECONDS * 2 ** (role.restarts - 1)
        role.restart_at = now + delay
        role.state = f"down, back in {delay:.0f} s"
        why = f" ({printable(role.last_error[:MOST_CHARACTERS])})" if role.last_error else ""
        what = f"{role.fault} and was killed" if role.fault else f"ended with exit code {code}{why}"
        _log.warning("%s %s: starting it again in %.0f s, see %s", role.name, what, delay, role.log_path)

    def _end_processes(self) -> None:
        """Sends SIGTERM to every process, waits, and kills the remaining ones."""
        running = [(role, role.process) for role in self._roles if role.process is not None]
        for _, process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        for role, process in running:
            try:
                process.wait(max(0.0, started + self._patience_seconds(role) - time.monotonic()))
            except subprocess.TimeoutExpired:
                _log.warning("%s did not end in time: killing it", role.name)
                process.kill()
                process.wait()
        for role in self._roles:
            role.close_pipe()
        self._end_processes_of_environments(self._roles)

    def _end_processes_of_environments(self, roles: list[RoleProcess]) -> None:
        """Kills the processes that environments in a role's own process have started; they would hold its locks."""
        environment = self._config.environment
        has_them = environment.is_vector or (environment.is_gymnasium and not environment.own_processes)
        for process in [role.process for role in roles if has_them and role.process is not None]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _patience_seconds(self, role: RoleProcess) -> float:
        """Returns how long a role may take to end; roles that save state may take longer."""
        if role.role not in ("learner", "replay"):
            return KILL_SECONDS
        return SAVE_SECONDS + (LAST_COPY_SECONDS if self._config.storage.url else 0.0)


@contextlib.contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Locks the run directory. Raises RunError if another run holds the lock, or if it cannot be written."""
    what = f"another run is using {directory}: stop it, or choose another run_directory"
    try:
        descriptor = lock_file(directory / "lock", RunError(what))
    except OSError as error:
        path = error.filename or directory
        raise RunError(f"{path} cannot be written ({error.strerror}): choose another run_directory") from None
    with open(descriptor):
        yield


def _end_at_once(local: LocalRun, links: LocalLinks) -> None:
    """Kills all processes and removes their sockets."""
    try:
        local.end_at_once()
    finally:
        links.close()


def _is_finished(config: Config, progress: RunProgress) -> bool:
    """Returns whether the run's newest checkpoint reaches a limit, and has been evaluated."""
    newest = checkpoint_steps(Path(config.directory, "checkpoints"))[-1:]
    evaluation = progress.latest_evaluation
    is_evaluated = evaluation is not None and newest == [progress.updates] == [evaluation.updates]
    return bool(progress.reached_limits) and is_evaluated


@contextlib.contextmanager
def open_run(config: Config, stop: StopSignal) -> Iterator[RunPage | None]:
    """Locks the run directory, fetches its copy, and opens the page of the run.

    Yields None, and prints why, if the run has reached its limit.
    """
    with run_lock(Path(config.directory)):
        remove_reports(config.directory)
        if config.storage.url:  # before the roles do: metrics fetched later would look like new ones
            fetch_missing(config, ["learner", "replay"], stop)
            check_resumable(config)  # the fetched run
        progress = ProgressReader(config.directory, config).read()
        if _is_finished(config, progress):
            print(finished_summary(progress, config.directory, changed_settings(config)), flush=True)
            yield None
            return
        with RunPage(config) as page:
            yield page


def check_local(config: Config) -> EnvironmentSpec:
    """Returns the description of the run's task; nothing is written.

    Raises UsageError or RunError for what a run on this machine would refuse after its start.
    """
    environment_spec = checked_description(config, is_tried=True)
    make_limiter(config, environment_spec.spec)
    check_journal(config, environment_spec.spec)
    check_video(config, environment_spec)
    log_reading(environment_spec)
    for warning in untried_packages():
        _log.warning("%s", warning)
    return environment_spec


def run(config: Config, name: str, stop: StopSignal) -> int:
    """Runs all roles and returns the process's exit code."""
    environment_spec = check_local(config)
    chosen = ""
    if config.actor.processes == 0:  # chosen here, once, because the exploration ladder of all roles depends on it
        actors, chosen = actor_processes(usable_cores(), has_gpu(config))
        config = config.replace(actor=replace(config.actor, processes=actors))
    links = LocalLinks()
    try:
        with open_run(config, stop) as run_page, ProcessReport(config, "local", name, stop) as report:
            if run_page is None:
                return stop.exit_code
            record_start(config)  # the learner adds to it; in one process it records the start itself
            addresses = AddressConfig(links.experience, links.sampling, links.weights, status="")
            if not stop.is_set():
                if chosen:
                    print(chosen, flush=True)
                config = config.replace(run_directory=config.directory)
                local = LocalRun(config, environment_spec, addresses, stop, run_page)
                report.describe = local.report
                stop.on_second_signal = lambda: _end_at_once(local, links)
                local.run()
    finally:
        links.close()
    return stop.exit_code


# The process of one role: its start, its restarts, and the error at the end of its log --------------------------------


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
        command = [*COMMAND, "--role", self.role, "--name", self.name, *arguments]
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
