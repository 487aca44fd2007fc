"""What `main.py status` shows of a fleet of real processes while a role is dead, stopped or on a full disk."""

from __future__ import annotations

import json
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from apex_jax.config.load import CONFIG_NAME
from tests.rigs.fleet import FORGOTTEN_SECONDS, Fleet, lasts
from tests.rigs.ports import free_port
from tests.rigs.processes import Program, Programs, checkpoints, wait_until

ROLES = ("replay", "learner", "actor-0", "evaluator")
SEEN_SECONDS = 75.0
NO_ROOM = """
import os, resource
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # otherwise it would keep entries that are cut off
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


class Watched:
    """A fleet, and the command that shows it."""

    def __init__(self, folder: Path, programs: Programs, fleet: Fleet):
        self.fleet = fleet
        self._programs = programs
        self._file = folder / "addresses"
        fleet.statuses = {name: f"tcp://127.0.0.1:{free_port()}" for name in ROLES}
        self._file.write_text("".join(f"{name}={address}\n" for name, address in fleet.statuses.items()))

    def status(self, *options: str) -> Program:
        """Runs the command to its end."""
        program = self._programs.start("status", "--fleet", str(self._file), *options)
        program.exit_code()
        return program

    def updates(self) -> int:
        """Returns the learner's count, which its status has even if no file can be written."""
        report = json.loads(self.status("--json").stdout)[self.fleet.statuses["learner"]]
        return int((report or {}).get("progress", {}).get("updates", {}).get("count", 0))

    def begins(self) -> None:
        """Starts all roles, and waits until something was learned."""
        self.fleet.start(*ROLES)
        self.fleet.running["learner"].wait_until(lambda: self.fleet.updates() > 0)
        self.shows_no_problem()

    def shows(self, name: str, problem: str) -> None:
        """Runs the command until it names this process with this problem, and exits with 1."""
        wait_until(lambda: self._matches(rf"(?m)^  {name} .*{problem}", exit_code=1), SEEN_SECONDS)

    def shows_no_problem(self) -> None:
        """Runs the command until it shows neither a problem nor refused messages, and exits with 0."""
        wait_until(lambda: self._matches(r"(?s)\A(?!.*refused).*problems\n  none", exit_code=0))

    def _matches(self, pattern: str, exit_code: int) -> bool:
        status = self.status()  # its output stays in program-*.out
        return re.search(pattern, status.stdout) is not None and status.exit_code() == exit_code


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    settings = "learner.checkpoint_interval_seconds=5", "evaluator.interval_seconds=1"
    with Programs(tmp_path) as programs, Fleet(programs, tmp_path / "run", *settings) as fleet:
        yield Watched(tmp_path, programs, fleet)


def test_fault_40_a_killed_role_is_named_until_it_is_back(watched: Watched) -> None:
    watched.begins()
    for name in ROLES:
        watched.fleet.end(name)
        watched.shows(name, "does not answer: Connection refused")
        watched.fleet.start(name)
        watched.shows_no_problem()


def test_fault_40_a_stopped_role_is_named_and_leaves_no_problem(watched: Watched) -> None:
    watched.begins()
    for name in ROLES:
        watched.fleet.running[name].send(signal.SIGSTOP)
        watched.shows(name, "has not answered within 4 s")
        lasts(FORGOTTEN_SECONDS)  # until its peers have given it up
        if name == "replay":
            watched.shows("learner", "is not connected to replay")
            watched.shows("learner", "no updates for ..+ s")
            watched.shows("actor-0", "no segments for ..+ s")
        watched.fleet.running[name].send(signal.SIGCONT)
        watched.shows_no_problem()


def test_fault_40_learner_learns_on_a_full_disk_and_is_named_with_the_path(watched: Watched) -> None:
    watched.fleet.start("replay", "actor-0", "evaluator")
    learner = watched.fleet.start("learner", lines=NO_ROOM)
    directory = watched.fleet.directory
    learner.wait_until(lambda: watched.updates() > 0)
    watched.shows("learner", f"cannot record the run: .*File too large: '{directory}/")
    watched.shows("learner", f"{directory}/checkpoints/.* was not saved")
    updates = watched.updates()
    learner.wait_until(lambda: watched.updates() > updates)
    resource.prlimit(learner.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    watched.shows_no_problem()
    assert checkpoints(directory)
    assert (directory / CONFIG_NAME).is_file()
    assert "Traceback" not in learner.stderr
