"""A run with several replay servers: it learns, each server has its share, and one that dies stops nobody."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.processes import Programs, catch, log, values

SERVERS = ("replay", "replay-1", "replay-2")
ENDLESS = "total_updates=100000000"
LEARNED = (ENDLESS, "evaluator.stop_at_return=0.9", "evaluator.interval_seconds=1")
THREE = ("replay.servers=3", "actor.environments=8")  # thus three actors

pytestmark = pytest.mark.timeout(480)


def newest(directory: Path, name: str, tag: str) -> float:
    return ([0.0, *values(directory, name, tag)])[-1]


def more_updates(directory: Path, count: int = 500) -> Callable[[], bool]:
    start = newest(directory, "learner", "learner/updates")
    return lambda: newest(directory, "learner", "learner/updates") > start + count


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with three servers that has made 2,000 updates."""
    folder = tmp_path_factory.mktemp("three")
    with Programs(folder) as programs:
        program = programs.start(*catch(folder / "run", *THREE, "total_updates=2000"))
        assert program.exit_code() == 0, program.stderr
    return folder / "run"


@pytest.mark.long
def test_each_of_three_replay_servers_has_actors_and_a_share_of_the_draws(finished: Path) -> None:
    assert values(finished, "evaluator", "eval/updates")[-1] == 2000
    for name in SERVERS:
        assert max(values(finished, name, "replay/actors")) == 1
        assert newest(finished, name, "ledger/stored") > 500
        assert max(values(finished, name, "replay/samples_per_second")) > 0
        assert newest(finished, name, "replay/samples_per_insert") == pytest.approx(8, abs=3)


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
def test_run_goes_on_with_what_each_server_held_and_with_one_that_lost_it(
    programs: Programs, finished: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "run"))
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
