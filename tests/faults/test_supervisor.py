"""Faults of processes under the supervisor: the role restarts, the run goes on, no orphan process stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from apex_jax.config import Config, EnvironmentConfig
from apex_jax.environments.environment import VectorEnvironment, segment_spec
from apex_jax.process import SUPERVISED
from tests.rigs.processes import ROOT, Program, Programs, catch, free_tcp_addresses, values, wait_until

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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_fault_35_an_actor_that_crashes_is_started_again_alone(
    programs: Programs, tmp_path: Path, number: signal.Signals
) -> None:
    directory = tmp_path / "run"
    program = started(programs, directory)
    before = programs.living()
    os.kill(before["actor-0"], number)
    program.wait_until(lambda: programs.living().get("actor-0", before["actor-0"]) != before["actor-0"])
    program.wait_until(lambda: (directory / "logs" / "actor-0.log").read_text().count("acting in ") == 2)
    goes_on(program, directory)
    after = programs.living()
    assert {name: pid for name, pid in after.items() if name != "actor-0"} == {
        name: pid for name, pid in before.items() if name != "actor-0"
    }
    assert program.stderr.count(f"actor-0 ended with exit code -{int(number)}: starting it again in 1 s") == 1


CRASHING = """
import ctypes, pathlib, sys, time

def note(what):
    with open(pathlib.Path(__file__).with_name("lives"), "a") as file:
        file.write(f"{what} {time.monotonic()}\\n")

def crash(environment):
    note("crashed")
    ctypes.string_at(0)

if "actor" in sys.argv:
    note("began")
    from apex_jax.environments.environment import VectorEnvironment
    VectorEnvironment.receive = crash
import main
sys.exit(main.main())
"""


@pytest.mark.slow  # it waits 31 s in all before it starts the actor again
@pytest.mark.timeout(450)
def test_fault_35_actor_that_always_crashes_is_given_up_after_doubling_pauses(
    programs: Programs, tmp_path: Path
) -> None:
    crashing = tmp_path / "crashing.py"
    crashing.write_text(CRASHING)
    command = f"role_process.COMMAND = [sys.executable, {str(crashing)!r}]"
    lines = f"import sys\nfrom apex_jax.workers import role_process\n{command}"
    program = programs.start(*catch(tmp_path / "run", ENDLESS), lines=lines, environment={"PYTHONPATH": str(ROOT)})
    assert program.exit_code(400) == 1
    assert programs.living() == {}
    said = re.findall(r"WARNING local: (\S+) ended with exit code (\S+): starting it again in (\d+) s", program.stderr)
    assert said == [("actor-0", str(-signal.SIGSEGV.value), str(delay)) for delay in (1, 2, 4, 8, 16)]
    assert "error: actor-0 failed 6 times in a row (exit code -11); the end of " in program.stderr
    assert "Traceback" not in program.stderr
    words, times = zip(*(line.split() for line in (tmp_path / "lives").read_text().splitlines()), strict=True)
    assert words == ("began", "crashed") * 6
    began, crashed = map(float, times[2::2]), map(float, times[1::2])
    assert all(start - end >= delay for end, start, delay in zip(crashed, began, (1, 2, 4, 8, 16), strict=False))


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
    pool = VectorEnvironment(config, segment_spec(config), np.array([1, 2]), 1000)
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
from apex_jax.operations import role_watch
role_watch.POLL_SECONDS = role_watch.ANSWER_SECONDS = 0.5
role_watch.STUCK_SECONDS = 20.0
"""


@pytest.mark.slow  # 20 s of silence each
@pytest.mark.parametrize("name", ["replay", "actor-0", "learner", "evaluator"])
def test_fault_35_role_without_progress_is_killed_and_restarted(programs: Programs, tmp_path: Path, name: str) -> None:
    directory = tmp_path / "run"
    program = started(programs, directory, "learner.checkpoint_interval_seconds=1", lines=IMPATIENT)
    stopped = programs.living()[name]
    said = {"replay": "joins", "learner": "joining", "actor-0": "acting", "evaluator": "mean return"}[name]
    program.wait_until(lambda: said in (directory / "logs" / f"{name}.log").read_text())  # it has long answered
    os.kill(stopped, signal.SIGSTOP)
    program.wait_until(lambda: programs.living().get(name, stopped) != stopped)
    goes_on(program, directory)
    killed = re.findall(
        rf"{name} has not answered for \d+ s and was killed: starting it again in 1 s, see", program.stderr
    )
    assert len(killed) == 1
    assert "ended with exit code" not in program.stderr


# Ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fault_35_no_role_outlives_a_killed_supervisor(programs: Programs, tmp_path: Path) -> None:
    program = started(programs, tmp_path / "run")
    roles = {name: pid for name, pid in programs.living().items() if name != "local"}
    assert roles.keys() == set(ROLES)
    program.send(signal.SIGKILL)
    program.exit_code()
    wait_until(lambda: not programs.living(), LEAVING_SECONDS)


@pytest.mark.slow
def test_fault_35_starting_role_does_not_outlive_a_killed_supervisor(programs: Programs, tmp_path: Path) -> None:
    program = programs.start(*catch(tmp_path / "run", ENDLESS))
    program.wait_until(lambda: len(programs.living()) == 5)
    program.send(signal.SIGKILL)
    assert program.exit_code() == -signal.SIGKILL
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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("role", ["replay", "learner", "actor", "evaluator"])
def test_fault_36_a_signal_ends_a_role_that_waits_for_its_peers(
    programs: Programs, tmp_path: Path, role: str, number: signal.Signals
) -> None:
    program = programs.start("--role", role, *catch(tmp_path / "run", *free_tcp_addresses()))
    said = {"replay": "replay of", "learner": "joining the", "actor": "waiting for the", "evaluator": "waiting for"}
    program.wait_until(lambda: said[role] in program.stderr)
    program.send(number)
    assert program.exit_code(LEAVING_SECONDS) == 128 + number
    assert "Traceback" not in program.stderr


# Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (
        ("--role", "replay", "security.insecure=true", "addresses.experience=tcp://192.0.2.1:5550"),
        1,
        "addresses.experience=tcp://192.0.2.1:5550",
    ),
    pytest.param(("environment.task=Pongg-v5",), 2, "did you mean Pong-v5", marks=pytest.mark.long),
    (("replay.capacity_transitions=-5",), 2, "replay.capacity_transitions=-5"),
    (("addresses.status=127.0.0.1:80",), 2, "addresses.status=127.0.0.1:80"),
    (("storage.url=bucket:/x",), 2, "storage.url=bucket:/x"),
    (("away_limit_seconds=1", "--role", "actor"), 1, "has been away for"),
    *(
        pytest.param(("away_limit_seconds=1", "--role", role), 1, "has been away for", marks=pytest.mark.long)
        for role in ("learner", "evaluator")
    ),
    pytest.param(("--role", "learner", "storage.url=s4://bucket/x"), 1, "s4://bucket/x", marks=pytest.mark.long),
], ids=lambda value: str(value[-1]) if isinstance(value, tuple) else "")  # fmt: skip
def test_fault_36_impossible_start_is_a_one_line_error(
    programs: Programs, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    program = programs.start(*catch(tmp_path / "run", *free_tcp_addresses()), *arguments)
    assert program.exit_code() == code
    [line] = [line for line in program.stderr.splitlines() if not re.match(r"\d\d:\d\d:\d\d (INFO|WARNING) ", line)]
    assert line.startswith("error: ")
    assert words in line
    assert programs.living() == {}
