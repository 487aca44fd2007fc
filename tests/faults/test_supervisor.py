"""Faults of processes under the supervisor: the role restarts, the run goes on, no orphan process stays."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from apex_jax.config import Config, EnvironmentConfig
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.process import SUPERVISED
from tests.rigs.processes import ROOT, Program, Programs, catch, free_tcp_addresses, leave, values, wait_until

ROLES = ("replay", "learner", "actor-0", "evaluator")
ENDLESS = "total_updates=100000000"
LEAVING_SECONDS = 40  # 30 to save, and a busy machine

pytestmark = pytest.mark.timeout(480)


def updates(directory: Path) -> list[float]:
    return values(directory, "learner", "learner/updates")


def started(programs: Programs, directory: Path, *arguments: str, lines: str = "") -> Program:
    """Returns a local run that learns."""
    program = programs.start(*catch(directory, ENDLESS, *arguments), lines=lines)
    program.wait_until(lambda: any(updates(directory)) and programs.living().keys() == {"local", *ROLES})
    return program


def goes_on(program: Program, directory: Path) -> None:
    known = len(updates(directory)), max(updates(directory))
    program.wait_until(lambda: len(updates(directory)) > known[0] and updates(directory)[-1] > known[1])


# EnvPool ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("action", "env_id"), [
    (np.array([6, 0]), [0, 1]),
    (np.array([-1, 0]), [0, 1]),
    (np.array([np.nan, 0.0]), [0, 1]),
    (np.array([0]), [0, 1]),
    (np.array([0, 0]), [0, 2]),
    (np.array([0]), [1]),
    (np.array([], np.int32), []),
    (np.array([0, 0], object), [0, 1]),
], ids=str)  # fmt: skip
def test_fault_35_invalid_actions_never_reach_envpool(action: np.ndarray, env_id: list[int]) -> None:
    config = Config(environment=EnvironmentConfig(task="Catch-v0", frame_stack=1, frame_skip=1))
    pool = VectorEnvironment(config, describe(config), np.array([1, 2]), 1000)
    step = pool.receive()
    bad = np.where(action == 6, 3, action) if action.size and action.dtype != object else action  # Catch has 3 actions
    with pytest.raises(ValueError, match="EnvPool would crash"):
        pool.send(bad, np.array(env_id, np.int32))
    pool.send(np.array([0, 2]), step.env_id)
    step = pool.receive()
    pool.send(np.array([1, 1]), step.env_id)
    with pytest.raises(ValueError, match="EnvPool would crash"):
        pool.send(np.array([1, 1]), step.env_id)  # a second time
    pool.receive()
    pool.close()


# Stuck ------------------------------------------------------------------------------------------------------------

IMPATIENT = """
from apex_jax.operations import records
records.STUCK_SECONDS = 20.0
"""


@pytest.mark.slow  # 20 s of silence each
def test_fault_35_role_without_progress_is_killed_and_restarted(programs: Programs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    program = started(programs, directory, "learner.checkpoint_interval_seconds=1", lines=IMPATIENT)

    def stop_until_replaced(name: str, said: str) -> None:
        log = directory / "logs" / f"{name}.log"
        program.wait_until(lambda: said in log.read_text())  # it has long answered
        stopped = programs.living()[name]
        os.kill(stopped, signal.SIGSTOP)
        program.wait_until(lambda: programs.living().get(name, stopped) != stopped)
        goes_on(program, directory)
        assert len(re.findall(rf"{name} has not reported for \d+ s and was killed", program.stderr)) == 1

    stop_until_replaced("replay", "joins")
    stop_until_replaced("actor-0", "acting")
    stop_until_replaced("evaluator", "mean return")
    stop_until_replaced("learner", "joining")
    assert "ended with exit code" not in program.stderr


# Killed -----------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_fault_35_each_killed_role_is_restarted_and_the_run_goes_on(programs: Programs, tmp_path: Path) -> None:
    def is_replaced(name: str, killed: int) -> bool:
        return programs.living().get(name, killed) != killed

    directory = tmp_path / "run"
    program = started(programs, directory, "learner.checkpoint_interval_seconds=1")
    for name in ROLES:
        killed = programs.living()[name]
        os.kill(killed, signal.SIGKILL)
        program.wait_until(partial(is_replaced, name, killed))
        goes_on(program, directory)
    assert all(f"{name} ended with exit code -9" in program.stderr for name in ROLES)
    program.send(signal.SIGINT)
    assert program.exit_code(LEAVING_SECONDS) == 130
    assert programs.living() == {}


# Ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fault_35_no_role_outlives_a_killed_supervisor(programs: Programs, tmp_path: Path) -> None:
    program = started(programs, tmp_path / "run")
    roles = {name: pid for name, pid in programs.living().items() if name != "local"}
    assert roles.keys() == set(ROLES)
    program.send(signal.SIGKILL)
    program.exit_code()
    wait_until(lambda: not programs.living(), LEAVING_SECONDS)


def test_fault_35_a_role_that_hangs_ends_itself_once_its_supervisor_has_died() -> None:
    lines = (
        "import threading\nfrom apex_jax import process\nprocess.ORPHAN_SECONDS = 0.1\n"
        "stop = process.StopSignal()\nstop.install()\nthreading.Event().wait(60)"
    )
    environment = {**os.environ, SUPERVISED: "1"}
    hanging = subprocess.Popen([sys.executable, "-c", lines], cwd=ROOT, env=environment, stdin=subprocess.PIPE)
    assert hanging.stdin is not None
    hanging.stdin.close()  # as the death of a supervisor does
    assert hanging.wait(20) == 1


@pytest.mark.slow
def test_fault_36_a_signal_ends_a_role_that_waits_for_its_peers(programs: Programs, tmp_path: Path) -> None:
    said = {"replay": "replay of", "learner": "joining the", "actor": "waiting for the", "evaluator": "waiting for"}
    roles = {role: programs.start("--role", role, *catch(tmp_path / role, *free_tcp_addresses())) for role in said}
    wait_until(lambda: all(said[role] in program.stderr for role, program in roles.items()))
    leave(roles.values())


# Bad input --------------------------------------------------------------------------------------------------------

TAKEN = ("--role", "replay", "addresses.sampling={taken}")
MISSPELT = ("environment.task=Pongg-v5",)


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (("--rolle", "actor"), 2, "did you mean --role"),
    (("--role", "actor", "addresses.experience=tcp://no.such.host.invalid:5550"), 1, "no.such.host.invalid"),
    pytest.param(TAKEN, 1, "choose a free address", marks=pytest.mark.long),
    pytest.param(MISSPELT, 2, "did you mean Pong-v5", marks=pytest.mark.long),
], ids=["a_flag", "a_host", "a_port", "a_task"])  # fmt: skip
def test_fault_36_impossible_start_fails_with_one_line(
    programs: Programs, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    settings = catch(tmp_path / "run", *free_tcp_addresses())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        given = [word.format(taken=address) for word in arguments]
        program = programs.start(*settings, *given)
        assert program.exit_code() == code
    [line] = program.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert code == 1 or not (tmp_path / "run").exists()
