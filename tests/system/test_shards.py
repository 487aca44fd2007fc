"""A run with several replay servers: it learns, each server has its share, and one that dies stops nobody."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs.ports import free_port
from tests.rigs.processes import Program, Programs, catch, values

SERVERS = ("replay", "replay-1", "replay-2")
ENDLESS = "total_updates=100000000"
LEARNED = (ENDLESS, "evaluator.stop_at_return=0.9", "evaluator.interval_seconds=1")
THREE = ("replay.servers=3", "actor.environments=8")  # thus three actors

pytestmark = pytest.mark.timeout(480)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with Programs(tmp_path) as programs:
        yield programs


def newest(directory: Path, name: str, tag: str) -> float:
    return ([0.0, *values(directory, name, tag)])[-1]


def log(directory: Path, name: str) -> str:
    path = directory / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def more_updates(directory: Path, count: int = 500) -> Callable[[], bool]:
    start = newest(directory, "learner", "learner/updates")
    return lambda: newest(directory, "learner", "learner/updates") > start + count


@pytest.mark.long
def test_catch_is_learned_with_three_replay_servers(programs: Programs, tmp_path: Path) -> None:
    program = programs.start(*catch(tmp_path / "run", *THREE, *LEARNED))
    assert program.exit_code(200.0) == 0, program.stderr


def test_each_of_three_replay_servers_has_actors_and_a_share_of_the_draws(programs: Programs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    program = programs.start(*catch(directory, *THREE, "total_updates=2000"))
    assert program.exit_code(200.0) == 0, program.stderr
    assert values(directory, "evaluator", "eval/updates")[-1] == 2000
    for name in SERVERS:
        assert max(values(directory, name, "replay/actors")) == 1
        assert newest(directory, name, "ledger/stored") > 500
        assert max(values(directory, name, "replay/samples_per_second")) > 0
        assert newest(directory, name, "replay/samples_per_insert") == pytest.approx(8, abs=3)
    assert "replay servers" in (directory / "report.html").read_text()


@pytest.mark.long
def test_fewer_actors_than_servers_are_refused_before_anything_starts(programs: Programs, tmp_path: Path) -> None:
    program = programs.start(*catch(tmp_path / "run", "replay.servers=2", "actor.processes=1"))
    assert program.exit_code() == 2
    fix = "must be 0 or at least replay.servers=2: each sends to one server"
    assert program.stderr == f"error: actor.processes=1: {fix}\n"


@pytest.mark.long
def test_two_devices_learn_from_a_server_each_and_one_device_goes_on(programs: Programs, tmp_path: Path) -> None:
    directory, two = tmp_path / "run", ("replay.servers=2", "actor.processes=2")
    program = programs.start(*catch(directory, *two, *LEARNED, "learner.devices=2"))
    assert program.exit_code() == 0, program.stderr
    assert "learning on cpu:0, cpu:1 in float32" in log(directory, "learner")
    assert min(max(values(directory, name, "replay/samples_per_second")) for name in SERVERS[:2]) > 0
    updates = newest(directory, "learner", "learner/updates")
    program = programs.start(*catch(directory, *two, f"total_updates={updates + 800:.0f}"))
    assert program.exit_code() == 0, program.stderr
    assert f"resuming from the checkpoint at {updates:.0f} updates" in log(directory, "learner")
    assert newest(directory, "learner", "learner/updates") == updates + 800


@pytest.mark.long
def test_run_goes_on_with_what_each_server_held_and_with_one_that_lost_it(programs: Programs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert programs.start(*catch(directory, *THREE, "total_updates=2000")).exit_code() == 0
    shutil.rmtree(directory / "replay-2")
    program = programs.start(*catch(directory, *THREE, "total_updates=4000"))
    assert program.exit_code() == 0, program.stderr
    joined = {name: log(directory, name).rpartition("replay of")[2] for name in SERVERS}
    assert ["; 0 segments are live" in joined[name] for name in SERVERS] == [False, False, True]
    assert newest(directory, "replay-2", "replay/samples_per_insert") > 0, "it was filled and drawn from again"
    assert newest(directory, "learner", "learner/updates") == 4000


@pytest.mark.long
def test_fault_40_killed_server_stops_nobody_and_is_drawn_from_again(programs: Programs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    program = programs.start(*catch(directory, *THREE, ENDLESS))
    program.wait_until(more_updates(directory))
    program.wait_until(lambda: all(newest(directory, name, "replay/samples_per_second") > 0 for name in SERVERS))
    before = programs.living()
    os.kill(before["replay-1"], signal.SIGKILL)
    program.wait_until(lambda: "2 of 3 replay servers are joined" in log(directory, "learner").rpartition("3 of 3")[2])
    program.wait_until(more_updates(directory))
    program.wait_until(lambda: log(directory, "learner").rpartition("2 of 3")[2].count("3 of 3 replay servers"))
    lines = len(values(directory, "replay-1", "replay/samples_per_second"))
    program.wait_until(lambda: any(values(directory, "replay-1", "replay/samples_per_second")[lines + 1 :]))
    program.wait_until(lambda: newest(directory, "replay-1", "replay/actors") == 1)
    after = programs.living()
    assert after.pop("replay-1") != before.pop("replay-1")
    assert after == before, "nobody else was restarted"
    program.send(signal.SIGTERM)
    assert program.exit_code() == 128 + signal.SIGTERM


class TwoServers:
    """A fleet of two replay servers, started one by one, with addresses of their own."""

    def __init__(self, programs: Programs, directory: Path) -> None:
        self.directory = directory
        self._programs = programs
        links = ("experience", "sampling")
        self._ports = {(link, index): free_port() for link in links for index in (0, 1)}
        self._all = [f"addresses.{link}=[{self._of(link, 0)},{self._of(link, 1)}]" for link in links]
        self._weights = f"addresses.weights=tcp://127.0.0.1:{free_port()}"

    def _of(self, link: str, index: int) -> str:
        return f"tcp://127.0.0.1:{self._ports[link, index]}"

    def server(self, index: int) -> Program:
        own = [f"addresses.{link}={self._of(link, index)}" for link in ("experience", "sampling")]
        name = f"replay-{index}" if index else "replay"
        return self._start("replay", name, *own, f"replay.index={index}")

    def start(self, role: str, name: str) -> Program:
        return self._start(role, name, *self._all)

    def _start(self, role: str, name: str, *settings: str) -> Program:
        run = catch(self.directory, ENDLESS, "replay.servers=2", "actor.ladder_size=32", self._weights, *settings)
        return self._programs.start("--role", role, "--name", name, *run)

    def actors(self, index: int) -> float:
        return newest(self.directory, f"replay-{index}" if index else "replay", "replay/actors")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fault_40_actor_of_a_server_that_is_gone_moves_on_and_back(programs: Programs, tmp_path: Path) -> None:
    fleet = TwoServers(programs, tmp_path / "run")
    _, second = fleet.server(0), fleet.server(1)
    learner, actors = fleet.start("learner", "learner"), [fleet.start("actor", f"actor-{i}") for i in range(2)]
    learner.wait_until(lambda: fleet.actors(0) == fleet.actors(1) == 1)
    learner.wait_until(more_updates(fleet.directory))
    second.send(signal.SIGKILL)
    second.exit_code()
    learner.wait_until(more_updates(fleet.directory))
    learner.wait_until(lambda: fleet.actors(0) == 2)
    assert sum(actor.stderr.count("joining replay server") for actor in actors) == 3
    fleet.server(1)
    learner.wait_until(lambda: fleet.actors(0) == fleet.actors(1) == 1)
    learner.wait_until(more_updates(fleet.directory))
    assert all("Traceback" not in program.stderr for program in (learner, *actors))
